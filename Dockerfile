# Two images of kvrelay: `--target gateway` (no torch) and `--target worker`.
#
#   docker build --target gateway -t kvrelay-gateway:0.1.0 .
#   docker build --target worker  -t kvrelay-worker:0.1.0 .                                             CUDA
#   docker build --target worker  -t kvrelay-worker:0.1.0-cpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#
# Models are mounted or downloaded, never built in. Probes are Kubernetes' business: there is no HEALTHCHECK.

ARG PYTHON_IMAGE=python:3.11-slim

# The wheel: what comes into the images of this source tree.
FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON_IMAGE} AS base
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="kvrelay" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.description="LLM serving with prefill and decode on separate pools of workers"
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1
RUN useradd --uid 10001 --user-group --home-dir /tmp --no-create-home --shell /usr/sbin/nologin kvrelay
ENTRYPOINT ["kvrelay"]

FROM base AS gateway
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/kvrelay-*.whl)[gateway]"
USER 10001:10001
CMD ["gateway"]

FROM base AS worker
# TORCH: which torch. TORCH_INDEX: where from, if not PyPI, whose torch brings CUDA's libraries.
ARG TORCH=torch>=2.9
ARG TORCH_INDEX=
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url ${TORCH_INDEX}} "${TORCH}"
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/kvrelay-*.whl)[worker]"
USER 10001:10001
