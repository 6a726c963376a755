"""What a benchmark run leaves behind: one record per request, everything else is computed from them.

The file that ``kvrelay bench --output`` writes is a :class:`RunResult` as JSON, with its figures as ``summary`` for readers;
``kvrelay bench compare`` reads it back, and computes the figures again. All times are seconds since the start of
the run (``RunResult.started_at`` on the wall clock), on one monotonic clock.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvrelay.launcher.errors import BenchError

FORMAT = 1
SHORT_ANSWER = "short answer"  # the one kind of failure in which the whole answer came


class TtftParts(msgspec.Struct, frozen=True, kw_only=True):
    """Where kvrelay says the time went, up to the second token; None is unknown or did not happen (local prefill)."""

    accept_s: float | None = None  # gateway: request read until it was sent to a worker
    queue_s: float | None = None  # worker: arrival until its first chunk started
    prefill_s: float | None = None  # worker: first chunk until the first token was sampled
    transfer_s: float | None = None  # decode worker: commit received until every block was verified
    first_step_s: float | None = None  # decode worker: verified until the first decode step's token
    ttft_s: float | None = None  # gateway: request read until the first token was written to the client
    second_token_s: float | None = None  # gateway: request read until the second token was written


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request: when it was due, when it was sent, when every chunk with new text or tokens came."""

    index: int
    stream: str  # the name of the part of the load: "main" or "burst"
    is_warmup: bool = False
    due_s: float  # when the plan wanted it sent; in a closed loop: when the answer before it had ended
    sent_s: float  # when it was sent; lateness is the generator's fault, not the server's
    finished_s: float
    prompt_tokens: int  # as the server counted them, else as planned
    planned_output_tokens: int
    output_tokens: int  # as the server counted them, else the number of chunks
    has_usage: bool = True  # whether the server counted them
    # Arrival of every chunk with content; the first is TTFT, differences are inter-token latencies.
    chunk_s: list[float] = []
    error: str | None = None  # "http 503", "timeout", "connection", "broken stream" or "short answer"
    error_text: str | None = None  # first 200 characters of what was said
    parts: TtftParts | None = None


class CpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine that ran the generator did, in cores (1.0 = one core busy all the time).

    From when the first counted request was due until the end of the time that rates are over: no start, no warm-up, no tail.
    """

    num_cores: int
    generator: float  # this process
    server: float | None  # the server's processes, if they are known: started by bench, or below --server-pid
    others: float  # everything else
    stolen: float  # taken by the hypervisor
    generator_max_lag_s: float  # longest that the generator's event loop was late


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run."""

    format: int = FORMAT
    name: str  # what the run is called in tables
    started_at: str  # ISO 8601, UTC
    duration_s: float  # what rates are over, see ``summary.rate_window``
    url: str
    model: str
    settings: dict[str, str]  # every setting of the run, as given
    environment: dict[str, str]  # of the generator: machine, cores, kernel, versions
    slo: dict[str, float] = {}  # "ttft", "itl", "e2e" → seconds
    requests: list[RequestRecord]
    cpu: CpuUse | None
    warnings: list[str] = []  # what makes the figures doubtful, such as a generator that was late


def read_result(path: Path) -> RunResult:
    """Read what ``report.write_result`` wrote; figures come from the records again. Raises BenchError."""
    try:
        result = msgspec.json.decode(path.read_bytes(), type=RunResult)
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise BenchError(f"{path} is not the result of a benchmark run: {error}") from error
    if result.format != FORMAT:
        raise BenchError(f"{path} has format {result.format}; this version reads format {FORMAT}")
    return result
