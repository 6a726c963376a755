"""llama.cpp's HTTP server as the package xllamacpp has it. Arguments: MODEL.gguf THREADS PORT SLOTS TOKENS_PER_SLOT."""

from __future__ import annotations

import signal
import sys

import xllamacpp


def main() -> None:
    """Serve until SIGTERM."""
    model, threads, port, slots, tokens = sys.argv[1], *(int(text) for text in sys.argv[2:6])
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.n_parallel = slots
    params.n_ctx = slots * tokens
    params.n_gpu_layers = 0
    params.cache_prompt = False
    server = xllamacpp.Server(params)
    print(f"xllamacpp {xllamacpp.__version__} at {server.listening_address}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    sys.exit(0)


if __name__ == "__main__":
    main()
