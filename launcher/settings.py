"""Settings of the launcher's own commands."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.common.settings import setting


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """``kvrelay local``: one deployment on this machine. What is not here reaches the components as KVRELAY_* variables."""

    model: str = setting("demo", "model directory, Hugging Face id, or 'demo'")
    prefill: int = setting(
        1, "prefill workers; with 0 the decode workers prefill themselves (colocated)", minimum=0, maximum=64
    )
    decode: int = setting(1, "decode workers", minimum=1, maximum=64)
    host: str = setting("127.0.0.1", "address that the HTTP API listens on")
    port: int = setting(8000, "port of the HTTP API; 0 takes a free one", minimum=0, maximum=65535)
    engine: str = setting(
        "model", "what computes: the model, or a fake without weights, for tests and load", choices=("model", "fake")
    )
    device: str = setting(
        "auto", "where the model runs; auto takes CUDA if there is a GPU", choices=("auto", "cpu", "cuda")
    )
    dtype: str = setting(
        "auto",
        "number format of weights and KV; auto is the checkpoint's, or float32 on a CPU without instructions or kernels of ours "
        "for that; the same on all workers",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    weight_format: str = setting(
        "full",
        "weights as --dtype has them, or the layers' rounded to 8 bits: fewer bytes per step of few streams, on a GPU half "
        "the memory; int8 on a CPU with bf16 and on GPUs, fp8 (e4m3) on GPUs of compute capability 8.9 or later",
        choices=("full", "int8", "fp8"),
    )
    threads: int | None = setting(
        None, "CPU threads of each worker; default: the cores divided by the workers", minimum=1, maximum=1024
    )
    max_model_len: int | None = setting(
        None, "longest prompt and output together; default: the model's own", unit="tokens", minimum=16
    )
    kv_memory_mb: int | None = setting(None, "memory of each worker's KV pool", unit="MiB", minimum=1)
    max_batched_tokens: int | None = setting(
        None,
        "tokens that a worker computes in one step; longer prompts are computed in chunks; default: 512, and 2048 for prefill on a "
        "GPU",
        minimum=16,
    )
    ttft_budget_ms: float | None = setting(
        None,
        "time to first token that prefill workers try to keep, by smaller steps and by letting short prompts overtake; 0: neither",
        unit="ms",
        minimum=0,
    )
    local_prefill_max_tokens: int | None = setting(
        None, "prompts up to this many uncached tokens go straight to a decode worker", unit="tokens", minimum=0
    )
    drain_s: float = setting(5.0, "how long running requests may finish after Ctrl-C", unit="s", minimum=0)
    log_level: str = setting("info", "how much is logged", choices=("debug", "info", "warning", "error"))
    quiet: bool = setting(False, "hide the components' logs, except of one that died")


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """``kvrelay verify``: is what we generate what the model says?"""

    model: str = setting("demo", "model directory, Hugging Face id, or 'demo'")
    dtype: str = setting(
        "float32", "number format of weights and KV, on both sides", choices=("bfloat16", "float16", "float32")
    )
    prompts: str | None = setting(None, "JSON lines with a text 'prompt' each; default: 20 built-in prompts")
    max_tokens: int = setting(64, "tokens to generate for each prompt", unit="tokens", minimum=1)
    url: str | None = setting(None, "compare a running deployment, instead of starting two here")
    api_key: str | None = setting(None, "sent to the deployment at --url as a bearer token")
    concurrency: int = setting(16, "requests at a time in the second pass", minimum=1, maximum=1024)
    device: str = setting(
        "auto", "where the model runs; auto takes CUDA if there is a GPU", choices=("auto", "cpu", "cuda")
    )
    threads: int | None = setting(None, "CPU threads of each worker", minimum=1, maximum=1024)
    timeout_s: float = setting(600.0, "how long one request, or the start, may take", unit="s", minimum=1)
