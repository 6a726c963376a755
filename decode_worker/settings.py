"""Settings of a decode worker."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.common.settings import setting
from kvrelay.worker.settings import ADMIN_PORT_HELP, SchedulerSettings, WorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSchedulerSettings(SchedulerSettings):
    """How sequences are batched."""

    max_num_seqs: int | None = setting(
        None, "sequences that generate at a time; default: 64 on a CPU, 256 on a GPU", minimum=1
    )
    max_batched_tokens: int | None = setting(
        None,
        "tokens of the largest step: one for each sequence that generates, the rest for prompts. Default: 512 on a "
        "CPU, 2048 on a GPU",
        minimum=16,
    )
    itl_budget_ms: float | None = setting(
        None,
        "longest time between two tokens while the worker computes prompts; raise it for sooner first tokens. 0: "
        "no bound. Default: 1.4 times a step of all sequences without prompts, at least 10 ms",
        unit="ms",
        minimum=0,
    )
    max_waiting: int = setting(512, "sequences that may wait; one more is refused", minimum=1)
    speculation: str = setting(
        "off",
        "what guesses the next tokens, so that a step checks several at a time; the text stays the same. guide: "
        "text that a JSON schema forces. ngram: that, and text that repeats itself. draft-model: a smaller model. "
        "head: an EAGLE-3 head. mtp: the layer that the model's checkpoint has for it",
        choices=("off", "guide", "ngram", "draft-model", "head", "mtp"),
    )
    draft_model: str | None = setting(
        None,
        "model, or EAGLE-3 head, that guesses with --speculation draft-model or head. A model must have the same "
        "tokens, and should be at least five times as fast",
    )
    draft_kv_memory_mb: int = setting(
        256,
        "memory of the own KV pool of the draft model, the head or the checkpoint's layer. Streams that find no room in it get no "
        "guesses",
        unit="MiB",
        minimum=1,
    )
    speculation_tokens: int = setting(
        7,
        "most tokens that are guessed for a sequence in a step; fewer if guesses fail or many sequences generate",
        minimum=1,
        maximum=32,
    )
    lease_ttl_s: float = setting(
        30.0, "how long blocks stay reserved for a hand-off from which nothing more comes", unit="s", minimum=0.1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings(WorkerSettings):
    """Everything a decode worker is started with."""

    scheduler: DecodeSchedulerSettings
    images: bool = setting(
        False,
        "read the images of prompts, where no prefill worker does. What encodes images takes memory from KV",
    )
    address: str = setting("tcp://127.0.0.1:7200", "ZeroMQ address that gateways and prefill workers connect to")
    data_address: str = setting("tcp://127.0.0.1:7201", "ZeroMQ address that receives KV blocks")
    admin_port: int = setting(7280, ADMIN_PORT_HELP, minimum=0, maximum=65535)
