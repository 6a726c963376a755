"""What makes figures doubtful, in words: requests failed, the generator was late, or somebody took the CPU. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvrelay.launcher.bench.records import CpuUse, RequestRecord
from kvrelay.launcher.bench.summary import Distribution, gaps, ttft

LATE_S = 0.02  # sending this late changes when queues form; timers alone are late by 1 or 2 ms
LEAST_LAG_S = 0.002  # timers are that late on an idle machine
LAG_SHARE = 0.1  # of the reported p99, by the loop's own p99
MAX_LAG_SHARE = 0.5  # of the longest reported time, by the loop's longest delay
MAX_LAG_S = 0.1  # whatever is reported
FULL_CORE = 0.85  # of a core, in one generator process
OTHERS_SHARE = 0.05  # of all cores
STOLEN_SHARE = 0.02
GENERATOR_SHARE = 0.1  # of the cores that the server runs on too
BUSY_SHARE = 0.9  # of all cores: nobody had time to spare


def doubts(records: Sequence[RequestRecord], cpu: CpuUse | None, *, num_processes: int) -> list[str]:
    """Warnings, the worst first; empty if there is nothing to say. ``records``: without warm-up."""
    found = [*_failures(records), *_lateness(records)]
    if cpu is not None:
        found += _generator(records, cpu, num_processes)
        found += _machine(cpu)
    return found


def _failures(records: Sequence[RequestRecord]) -> list[str]:
    found: list[str] = []
    kinds = Counter(record.error for record in records if record.error is not None)
    if kinds:
        named = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        found.append(
            f"{kinds.total()} of {len(records)} requests failed ({named}): times to the first token and of whole answers leave "
            "them out, tokens and rates count what succeeded, until the last success or sending"
        )
    num_uncounted = sum(not record.has_usage for record in records)
    if num_uncounted:
        found.append(
            f"the server did not count the tokens of {num_uncounted} answers: a chunk is taken for a token there, "
            "and an answer that is too short may have passed for a whole one"
        )
    return found


def _lateness(records: Sequence[RequestRecord]) -> list[str]:
    late_s = sorted(record.sent_s - record.due_s for record in records)
    num_late = sum(1 for value in late_s if value > LATE_S)
    if not num_late:
        return []
    return [
        f"{num_late} of {len(late_s)} requests were sent more than {LATE_S * 1e3:.0f} ms after they were due, or after their place "
        f"was free, the latest {late_s[-1] * 1e3:.0f} ms: the load was not what was asked for"
    ]


def _generator(records: Sequence[RequestRecord], cpu: CpuUse, num_processes: int) -> list[str]:
    found: list[str] = []
    more = "it, and not the server, may be what limits the figures; give more --processes, or another machine"
    if cpu.generator > FULL_CORE * num_processes:
        found.append(
            f"the generator used {cpu.generator:.2f} cores with {num_processes} process{'es' if num_processes > 1 else ''}: {more}"
        )
    elif cpu.generator_busiest is not None and cpu.generator_busiest > FULL_CORE:
        found.append(
            f"a generator process used {cpu.generator_busiest:.2f} of a core in its busiest second: then {more}"
        )
    where, reported = _reported(records)
    p99_s = cpu.generator_lag_p99_s
    if reported is not None and p99_s is not None and p99_s > max(LEAST_LAG_S, LAG_SHARE * reported.p99):
        found.append(
            f"the generator's event loop was late by {_ms(p99_s)} at its 99th percentile, and by {_ms(cpu.generator_max_lag_s)} at "
            f"most: the reported {_ms(reported.p99)} (p99) and {_ms(reported.max)} (max) {where} are partly its own"
        )
    elif _is_long(cpu.generator_max_lag_s, reported):
        found.append(
            f"the generator's event loop was late by up to {_ms(cpu.generator_max_lag_s)}: single latencies may look longer by that"
        )
    return found


def _reported(records: Sequence[RequestRecord]) -> tuple[str, Distribution | None]:
    """The finest times that are reported, and where: between tokens, or until the first one of answers that have only one."""
    good = [
        record for record in records if record.error is None
    ]  # a timeout's wait is long whatever the generator does
    between = Distribution.of(gap for record in good for gap in gaps(record))
    if between is not None:
        return "between tokens", between
    firsts = (value for record in good if (value := ttft(record)) is not None)
    return "until the first token", Distribution.of(firsts)


def _is_long(lag_s: float, reported: Distribution | None) -> bool:
    if lag_s > MAX_LAG_S:
        return True
    return reported is not None and lag_s > max(LATE_S, MAX_LAG_SHARE * reported.max)


def _machine(cpu: CpuUse) -> list[str]:
    found: list[str] = []
    is_server_known = cpu.server is not None
    if cpu.others > max(0.1, OTHERS_SHARE * cpu.num_cores) and is_server_known:
        found.append(f"other programs used {cpu.others:.2f} of {cpu.num_cores} cores meanwhile: the server had less")
    if cpu.stolen > STOLEN_SHARE * cpu.num_cores:
        found.append(f"the hypervisor took {cpu.stolen:.2f} of {cpu.num_cores} cores: the machine was not all ours")
    busy = cpu.generator + (cpu.server or 0.0) + cpu.others + cpu.stolen
    if busy > BUSY_SHARE * cpu.num_cores:
        if not is_server_known:  # whose the others are is not known: the server may be one of them
            found.append(
                f"{busy:.2f} of {cpu.num_cores} cores of this machine were busy, {cpu.others:.2f} with other programs: "
                "the generator, and the server if it runs here, had to wait for a core"
            )
        elif cpu.generator > GENERATOR_SHARE * cpu.num_cores:
            found.append(
                f"all cores were busy and the generator used {cpu.generator:.2f} of them: the server would be faster without it"
            )
    return found


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"
