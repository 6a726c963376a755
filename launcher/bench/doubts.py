"""What makes figures doubtful, in words: requests failed, the generator was late, or somebody took the CPU. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvrelay.launcher.bench.records import CpuUse, RequestRecord

LATE_S = 0.02  # sending this late changes when queues form, and a loop this late lengthens what it times
FULL_CORE = 0.85  # of the one that the generator can use
OTHERS_SHARE = 0.05  # of all cores
STOLEN_SHARE = 0.02


def doubts(records: Sequence[RequestRecord], cpu: CpuUse | None) -> list[str]:
    """Warnings, the worst first; empty if there is nothing to say. ``records``: without warm-up."""
    found: list[str] = []
    kinds = Counter(record.error for record in records if record.error is not None)
    if kinds:
        named = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        found.append(
            f"{kinds.total()} of {len(records)} requests failed ({named}): times to the first token and of whole answers leave "
            "them out, tokens and rates count what succeeded, until the last success or sending"
        )
    if num_uncounted := sum(not record.has_usage for record in records):
        found.append(
            f"the server did not count the tokens of {num_uncounted} answers: a chunk is taken for a token there"
        )
    late_s = [late for record in records if (late := record.sent_s - record.due_s) > LATE_S]
    if late_s:
        found.append(
            f"{len(late_s)} of {len(records)} requests were sent more than {LATE_S * 1e3:.0f} ms after they were due, the latest "
            f"{max(late_s) * 1e3:.0f} ms: the load was not what was asked for"
        )
    return found if cpu is None else found + _of_machine(cpu)


def _of_machine(cpu: CpuUse) -> list[str]:
    found: list[str] = []
    if cpu.generator > FULL_CORE:
        found.append(
            f"the generator used {cpu.generator:.2f} cores of the one that it can: it, and not the server, may be what "
            "limits the figures; send from several machines"
        )
    if cpu.generator_max_lag_s > LATE_S:
        found.append(
            f"the generator's event loop was late by up to {cpu.generator_max_lag_s * 1e3:.0f} ms: single latencies may look "
            "longer by that"
        )
    if cpu.server is not None and cpu.others > max(0.1, OTHERS_SHARE * cpu.num_cores):
        found.append(f"other programs used {cpu.others:.2f} of {cpu.num_cores} cores meanwhile: the server had less")
    if cpu.stolen > STOLEN_SHARE * cpu.num_cores:
        found.append(f"the hypervisor took {cpu.stolen:.2f} of {cpu.num_cores} cores: the machine was not all ours")
    return found
