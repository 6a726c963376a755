"""Settings of a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.common.settings import setting
from kvrelay.worker.settings import ADMIN_PORT_HELP, SchedulerSettings, WorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSchedulerSettings(SchedulerSettings):
    """How prompts are batched."""

    max_batched_tokens: int | None = setting(
        None,
        "prompt tokens of the largest step; longer prompts are computed in chunks. Lower it to save GPU memory. "
        "default: 512 on a CPU, 2048 on a GPU",
        minimum=16,
    )
    ttft_budget_ms: float = setting(
        1000.0,
        "time to first token to aim for: lower it if short prompts wait behind long ones. 0: the largest steps, "
        "first come, first served",
        unit="ms",
        minimum=0,
    )
    max_num_seqs: int = setting(32, "prompts in progress at a time", minimum=1)
    max_waiting: int = setting(512, "prompts that may wait; one more is refused", minimum=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSettings(WorkerSettings):
    """Everything a prefill worker is started with."""

    scheduler: PrefillSchedulerSettings
    host_kv_mb: int = setting(
        0,
        "host memory for KV blocks that leave a GPU's pool: prompts that begin with them take them back. Several times the "
        "pool is of use. 0: none",
        unit="MiB",
        minimum=0,
    )
    address: str = setting("tcp://127.0.0.1:7100", "ZeroMQ address that gateways connect to")
    admin_port: int = setting(7180, ADMIN_PORT_HELP, minimum=0, maximum=65535)
