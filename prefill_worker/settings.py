"""Settings of a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.common.settings import setting
from kvrelay.engine.settings import FakeSettings, KvSettings, ModelSettings
from kvrelay.wire.settings import DataSettings, SameHostSettings, SecuritySettings


@dataclass(frozen=True, slots=True)
class PrefillSchedulerSettings:
    """How prompts are batched."""

    max_batched_tokens: int | None = setting(
        None,
        "tokens computed in one step at most, over all prompts; longer prompts are computed in chunks, whose size follows from "
        "--ttft-budget-ms; default: 512 on a CPU, 2048 on a GPU, where memory is kept for a step of so many",
        minimum=16,
    )
    ttft_budget_ms: float = setting(
        1000.0,
        "time to first token that the worker tries to keep: a step takes a quarter of it at most, and a prompt that would be late "
        "may overtake one at least twice as long; 0: steps as large as they may be, first come, first served",
        unit="ms",
        minimum=0,
    )
    max_num_seqs: int = setting(32, "prompts in progress at a time", minimum=1)
    max_waiting: int = setting(512, "prompts that may wait; one more is refused", minimum=1)


@dataclass(frozen=True, slots=True)
class PrefillSettings:
    """Everything a prefill worker is started with."""

    model: ModelSettings
    kv: KvSettings
    fake: FakeSettings
    scheduler: PrefillSchedulerSettings
    security: SecuritySettings
    same_host: SameHostSettings
    data: DataSettings
    address: str = setting("tcp://127.0.0.1:7100", "ZeroMQ address that gateways connect to")
    admin_port: int = setting(7180, "HTTP port of /health, /metrics and /debug/kv", minimum=0, maximum=65535)
    admin_host: str = setting("127.0.0.1", "HTTP address of /health, /metrics and /debug/kv")
    worker_id: str | None = setting(None, "name in logs and status; default: made from role, host and process")
    drain_s: float = setting(30.0, "how long running requests may finish after SIGTERM", unit="s", minimum=0)
    log_level: str = setting("info", "how much is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = setting("text", "shape of log lines", choices=("text", "json"))
