"""The data of a benchmark run: one record per request. All figures are computed from the records.

``kvrelay bench --output`` writes a :class:`RunResult` as JSON, with its figures as ``summary`` for readers. ``kvrelay bench
compare`` reads the file and computes the figures again. Times are seconds since the start of the run on one monotonic clock;
``RunResult.started_at`` is that start on the wall clock.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvrelay.launcher.errors import BenchError

FORMAT = 1
SHORT_ANSWER = "short answer"  # the only failure in which the whole answer came


class TtftParts(msgspec.Struct, frozen=True, kw_only=True):
    """Where kvrelay spent the time up to the second token. None: unknown, or it did not happen (local prefill)."""

    accept_s: float | None = None  # gateway: request read until it was sent to a worker
    queue_s: float | None = None  # worker: arrival until its first chunk started
    prefill_s: float | None = None  # worker: first chunk until the first token was sampled
    transfer_s: float | None = None  # decode worker: commit received until every block was verified
    first_step_s: float | None = None  # decode worker: verified until the first decode step's token
    ttft_s: float | None = None  # gateway: request read until the first token was written to the client
    second_token_s: float | None = None  # gateway: request read until the second token was written


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request: when it was due, when it was sent, and when every chunk with new text or tokens came."""

    index: int
    stream: str  # part of the load: "main" or "burst"
    is_warmup: bool = False
    due_s: float  # planned send time; in a closed loop: the end of the answer before it
    sent_s: float  # actual send time; lateness is the generator's fault, not the server's
    finished_s: float
    prompt_tokens: int  # as the server counted them, else as planned
    planned_output_tokens: int
    output_tokens: int  # as the server counted them, else the number of chunks
    has_usage: bool = True  # whether the server counted them
    # Arrival of every chunk with content; the first is TTFT, differences are inter-token latencies.
    chunk_s: list[float] = []
    error: str | None = None  # "http 503", "timeout", "connection", "broken stream" or "short answer"
    error_text: str | None = None  # first 200 characters of the error message
    parts: TtftParts | None = None


class CpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """CPU use of the generator's machine, in cores (1.0 = one core busy all the time).

    It covers the time that rates cover, so no start, no warm-up, and no waiting for last answers.
    """

    num_cores: int
    generator: float  # this process
    server: float | None  # the server's processes; None: unknown, without --self-serve and --server-pid
    others: float  # everything else
    stolen: float  # taken by the hypervisor
    generator_max_lag_s: float  # longest delay of the generator's event loop


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run."""

    format: int = FORMAT
    name: str  # its name in tables
    started_at: str  # ISO 8601, UTC
    duration_s: float  # the time that rates cover, see ``summary.rate_window``
    url: str
    model: str
    settings: dict[str, str]  # every setting of the run, as given
    environment: dict[str, str]  # of the generator: machine, cores, kernel, versions
    slo: dict[str, float] = {}  # "ttft", "itl", "e2e" → seconds
    requests: list[RequestRecord]
    cpu: CpuUse | None
    warnings: list[str] = []  # reasons to doubt the figures, such as a late generator


def read_result(path: Path) -> RunResult:
    """Read a file of ``report.write_result``, without its figures. Raises BenchError."""
    try:
        result = msgspec.json.decode(path.read_bytes(), type=RunResult)
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise BenchError(f"{path} is not the result of a benchmark run: {error}") from error
    if result.format != FORMAT:
        raise BenchError(f"{path} has format {result.format}; this version reads format {FORMAT}")
    return result
