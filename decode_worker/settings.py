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
        "tokens computed in one step: one per generating sequence, the rest for local prefill; default: 512 on a CPU, 2048 on a "
        "GPU",
        minimum=16,
    )
    itl_budget_ms: float | None = setting(
        None,
        "longest time between two tokens while the worker computes prompts, which get a quarter of a step's time at least; raise "
        "it for sooner first tokens; 0: no bound; default: 1.4 times a step without prompts, at least 10 ms",
        unit="ms",
        minimum=0,
    )
    max_waiting: int = setting(512, "sequences that may wait; one more is refused", minimum=1)
    speculation: str = setting(
        "off",
        "what guesses the next tokens, which a step then computes together; the text stays the same: guide takes text that a "
        "JSON schema or another guide forces, ngram looks others up in prompt and output, too, draft-model asks a smaller model, "
        "head an EAGLE-3 head",
        choices=("off", "guide", "ngram", "draft-model", "head"),
    )
    draft_model: str | None = setting(
        None,
        "model that guesses with --speculation draft-model, named as --model is; it must have the same tokens, and should be at "
        "least five times as fast; with --speculation head the model's EAGLE-3 head",
    )
    draft_kv_memory_mb: int = setting(
        256,
        "memory of the draft model's own KV pool; streams that find no room in it get no guesses; of a head's, which all streams "
        "share alike",
        unit="MiB",
        minimum=1,
    )
    speculation_tokens: int = setting(
        7,
        "tokens that are guessed at most for a sequence; fewer, if guesses fail or many sequences generate",
        minimum=1,
        maximum=32,
    )
    lease_ttl_s: float = setting(
        30.0, "how long reserved blocks outlive the last traffic of their hand-off", unit="s", minimum=0.1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings(WorkerSettings):
    """Everything a decode worker is started with."""

    scheduler: DecodeSchedulerSettings
    address: str = setting("tcp://127.0.0.1:7200", "ZeroMQ address that gateways and prefill workers connect to")
    data_address: str = setting("tcp://127.0.0.1:7201", "ZeroMQ address that receives KV blocks")
    admin_port: int = setting(7280, ADMIN_PORT_HELP, minimum=0, maximum=65535)
