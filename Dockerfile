# Two images of kvrelay: `--target gateway` (no torch) and `--target worker`.
#
#   docker build --target gateway -t kvrelay-gateway:0.1.0 .
#   docker build --target worker  -t kvrelay-worker:0.1.0 .                                             CUDA
#   docker build --target worker  -t kvrelay-worker:0.1.0-cpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#
# Models are mounted or downloaded, never built in. Probes are Kubernetes' business: there is no HEALTHCHECK. Kernels for the CPU
# (engine/backends/cpu/native) are compiled in a stage that is left behind; a worker for CUDA has gcc, with which Triton compiles what launches kernels.

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# The wheel of this source tree, and what each image needs beside it, in the versions that the tests passed with: those layers
# change only when pyproject.toml or constraints.txt does. torch brings the Triton that it was made for.
FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /source
COPY pyproject.toml constraints.txt ./
RUN mkdir /requirements && grep -v '^triton=' constraints.txt >/requirements/constraints.txt && python -c "import tomllib; \
project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = project['optional-dependencies']; \
[open(f'/requirements/{name}.txt', 'w').write('\n'.join(project['dependencies'] + [one for extra in own for one in extras[extra]])) \
 for name, own in {'gateway': ('gateway', 'tracing'), 'worker': ('worker',)}.items()]"
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1
RUN useradd --uid 10001 --user-group --home-dir /tmp --no-create-home --shell /usr/sbin/nologin kvrelay

FROM base AS gateway
COPY --from=wheel /requirements/gateway.txt /requirements/constraints.txt /opt/kvrelay/
# The Kubernetes client brings all of itself a second time for asyncio: half of its 125 MB, and nobody here imports it.
RUN pip install --no-cache-dir -r /opt/kvrelay/gateway.txt -c /opt/kvrelay/constraints.txt && \
    rm -r "$(python -c 'import kubernetes; print(kubernetes.__path__[0])')/aio"
COPY --from=wheel /wheels /opt/kvrelay/wheels
RUN pip install --no-cache-dir --no-deps /opt/kvrelay/wheels/*.whl
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="kvrelay gateway" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.description="The HTTP API in front of kvrelay's prefill and decode workers"
USER 10001:10001
ENTRYPOINT ["kvrelay"]
CMD ["gateway"]

FROM base AS worker-packages
# TORCH: which torch, and the torchvision that fits it: some models prepare images with it. TORCH_INDEX: where from, if not from the
# index that pip is set up with, whose torch usually brings CUDA's libraries.
ARG TORCH="torch>=2.9 torchvision"
ARG TORCH_INDEX=
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url ${TORCH_INDEX}} ${TORCH}
COPY --from=wheel /requirements/worker.txt /requirements/constraints.txt /opt/kvrelay/
RUN pip install --no-cache-dir -r /opt/kvrelay/worker.txt -c /opt/kvrelay/constraints.txt

FROM worker-packages AS native
RUN apt-get update && apt-get install --yes --no-install-recommends g++ libc6-dev
COPY src/kvrelay/__init__.py /source/kvrelay/
COPY engine/__init__.py /source/kvrelay/engine/
COPY common/__init__.py common/kv_geometry.py /source/kvrelay/common/
COPY engine/backends/cpu/native /source/kvrelay/engine/backends/cpu/native
RUN PYTHONPATH=/source python -m kvrelay.engine.backends.cpu.native.prebuild /native

FROM worker-packages AS worker
RUN if python -c 'import triton'; then \
    apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; fi
COPY --from=native /native /opt/kvrelay/native
COPY --from=wheel /wheels /opt/kvrelay/wheels
RUN pip install --no-cache-dir --no-deps /opt/kvrelay/wheels/*.whl && \
    ln -s /opt/kvrelay/native "$(python -c 'import kvrelay.engine; print(kvrelay.engine.__path__[0])')/backends/cpu/native/prebuilt"
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="kvrelay worker" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.description="kvrelay's prefill and decode workers"
USER 10001:10001
ENTRYPOINT ["kvrelay"]
CMD ["decode-worker"]
