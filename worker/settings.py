"""Settings that workers of both roles have."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.common.settings import setting
from kvrelay.engine.settings import FakeSettings, KvSettings, ModelSettings, NodeSettings
from kvrelay.wire.settings import SERVED_MODEL_NAME_HELP, SameHostSettings, SecuritySettings

ADMIN_PORT_HELP = "HTTP port of /health, /metrics and /debug/kv"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """What every scheduler bounds. Each role has its own defaults, and more settings."""

    max_num_seqs: int | None
    max_batched_tokens: int | None
    max_waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a worker is started with. A role gives what has no default here its own."""

    model: ModelSettings
    nodes: NodeSettings
    kv: KvSettings
    fake: FakeSettings
    security: SecuritySettings
    same_host: SameHostSettings
    scheduler: SchedulerSettings
    address: str
    admin_port: int
    admin_host: str = setting("127.0.0.1", "HTTP address of /health, /metrics and /debug/kv")
    worker_id: str | None = setting(None, "name in logs and status; default: made from role, host and process")
    served_model_name: str | None = setting(None, SERVED_MODEL_NAME_HELP)
    drain_s: float = setting(30.0, "how long running requests may finish after SIGTERM", unit="s", minimum=0)
    canary_period_s: float = setting(
        60.0,
        "how often an idle worker checks itself: it computes a known prompt, and ends if the answer has changed. "
        "0: never",
        unit="s",
        minimum=0,
    )
    log_level: str = setting("info", "how much is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = setting("text", "shape of log lines", choices=("text", "json"))
