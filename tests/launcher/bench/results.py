"""Hand-made results of runs, for tests of reports."""

from __future__ import annotations

from kvrelay.launcher.bench.records import CpuUse, RequestRecord, RunResult, TtftParts

PARTS = TtftParts(
    accept_s=0.001,
    queue_s=0.01,
    prefill_s=0.2,
    transfer_s=0.002,
    first_step_s=0.012,
    ttft_s=0.245,
    second_token_s=0.262,
)
CPU = CpuUse(num_cores=2, generator=0.1, server=1.5, others=0.05, stolen=0.0, generator_max_lag_s=0.003)


def record(index: int = 0, **changes: object) -> RequestRecord:
    """A request with three tokens, the first 1 s after it was due."""
    values: dict[str, object] = {
        "index": index,
        "stream": "main",
        "due_s": 0.0,
        "sent_s": 0.5,
        "finished_s": 3.0,
        "prompt_tokens": 10,
        "planned_output_tokens": 3,
        "output_tokens": 3,
        "chunk_s": [1.0, 1.5, 3.0],
    }
    return RequestRecord(**{**values, **changes})  # type: ignore[arg-type]


def result(name: str = "run", *, gap_s: float = 0.02, **changes: object) -> RunResult:
    """A run of four streams of 50 tokens, and a burst of one request that fails."""
    requests = [
        record(
            index,
            due_s=0.1 * index,
            sent_s=0.1 * index,
            finished_s=0.1 * index + 0.25 + 49 * gap_s,
            prompt_tokens=100,
            output_tokens=50,
            chunk_s=[0.1 * index + 0.25 + place * gap_s for place in range(50)],
            parts=PARTS,
        )
        for index in range(4)
    ]
    failed: dict[str, object] = {"output_tokens": 0, "chunk_s": [], "error": "http 503", "error_text": "no room"}
    requests.append(record(4, stream="burst", due_s=0.5, sent_s=0.5, finished_s=0.6, prompt_tokens=1500, **failed))
    values: dict[str, object] = {
        "name": name,
        "started_at": "2026-01-01T00:00:00+00:00",
        "duration_s": 2.0,
        "url": "http://127.0.0.1:1",
        "model": "m",
        "settings": {"input_len": "100", "seed": "0"},
        "environment": {"cpu": "one"},
        "slo": {"ttft": 1.0, "itl": 0.1},
        "requests": requests,
        "cpu": CPU,
        "warnings": ["the generator was late"],
    }
    return RunResult(**{**values, **changes})  # type: ignore[arg-type]
