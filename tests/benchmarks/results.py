"""Hand-made records and runs, for tests of figures."""

from __future__ import annotations

from kvrelay.launcher.bench.records import CpuUse, RequestRecord, RunResult


def record(stream: str, sent_s: float, chunk_s: list[float]) -> RequestRecord:
    """A request that ended at its last chunk."""
    return RequestRecord(
        index=0,
        stream=stream,
        due_s=sent_s,
        sent_s=sent_s,
        finished_s=chunk_s[-1],
        prompt_tokens=128,
        planned_output_tokens=len(chunk_s),
        output_tokens=len(chunk_s),
        chunk_s=chunk_s,
    )


def run(*records: RequestRecord, cpu: CpuUse | None = None, warnings: tuple[str, ...] = ()) -> RunResult:
    """A run of ``records``."""
    duration_s = max(item.finished_s for item in records) - min(item.sent_s for item in records)
    return RunResult(
        name="",
        started_at="",
        duration_s=duration_s,
        url="",
        model="",
        settings={},
        environment={},
        requests=list(records),
        cpu=cpu,
        warnings=list(warnings),
    )


def steps(first_s: float, step_s: float, count: int) -> list[float]:
    """Times of ``count`` chunks, ``step_s`` apart."""
    return [first_s + step_s * number for number in range(count)]


def stuttering() -> RunResult:
    """A stream of 20 ms a token, but 50 ms from 3.0 to 5.0 s, while a request with a long prompt runs."""
    return run(
        record("main", 0.0, [*steps(1.0, 0.02, 100), *steps(3.02, 0.05, 39), *steps(5.02, 0.02, 1000)]),
        record("burst", 3.0, [4.5, 5.0]),
    )
