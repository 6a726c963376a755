"""What makes figures doubtful, in words: the generator was late, or somebody took the CPU. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.launcher.bench.records import CpuUse, RequestRecord

LATE_S = 0.02  # sending this late changes when queues form; timers alone are late by 1 or 2 ms
LAG_S = 0.1
FULL_CORE = 0.85  # of a core, in one generator process
OTHERS_SHARE = 0.05  # of all cores
STOLEN_SHARE = 0.02
GENERATOR_SHARE = 0.1  # of the cores that the server runs on too
BUSY_SHARE = 0.9  # of all cores: nobody had time to spare


def doubts(
    records: Sequence[RequestRecord], cpu: CpuUse | None, *, num_processes: int, is_self_served: bool
) -> list[str]:
    """Warnings, the worst first; empty if there is nothing to say. ``records``: without warm-up."""
    found: list[str] = []
    late_s = sorted(record.sent_s - record.due_s for record in records)
    num_late = sum(1 for value in late_s if value > LATE_S)
    if num_late:
        found.append(
            f"{num_late} of {len(late_s)} requests were sent more than {LATE_S * 1e3:.0f} ms after they were due, "
            f"the latest {late_s[-1] * 1e3:.0f} ms: the load was not what was asked for"
        )
    if cpu is None:
        return found
    if cpu.generator > FULL_CORE * num_processes:
        found.append(
            f"the generator used {cpu.generator:.2f} cores with {num_processes} process{'es' if num_processes > 1 else ''}: "
            "it, and not the server, may be what limits the figures; give more --processes, or another machine"
        )
    if cpu.generator_max_lag_s > LAG_S:
        found.append(
            f"the generator's event loop was late by up to {cpu.generator_max_lag_s * 1e3:.0f} ms: "
            "single latencies may look longer by that"
        )
    if cpu.others > max(0.1, OTHERS_SHARE * cpu.num_cores) and is_self_served:
        found.append(f"other programs used {cpu.others:.2f} of {cpu.num_cores} cores meanwhile: the server had less")
    if cpu.stolen > STOLEN_SHARE * cpu.num_cores:
        found.append(f"the hypervisor took {cpu.stolen:.2f} of {cpu.num_cores} cores: the machine was not all ours")
    if is_self_served:
        busy = cpu.generator + (cpu.server or 0.0) + cpu.others + cpu.stolen
        if busy > BUSY_SHARE * cpu.num_cores and cpu.generator > GENERATOR_SHARE * cpu.num_cores:
            found.append(
                f"all cores were busy and the generator used {cpu.generator:.2f} of them: the server would be faster without it"
            )
    return found
