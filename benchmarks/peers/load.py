"""A load, and which of its requests failed. What a sample means is in ``figures.py``."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.launcher.bench.records import RequestRecord, RunResult


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop: ``concurrency`` requests at a time, forced to ``output_len`` tokens, random prompts, none used twice.

    ``requests`` in all; or, with ``duration_s``, as many as begin in that time. ``burst`` is `kvrelay bench`'s option.
    """

    concurrency: int
    input_len: int = 128  # tokens
    output_len: int = 64  # tokens
    requests: int | None = None
    duration_s: float | None = None
    burst: str | None = None

    @property
    def words(self) -> str:
        """For people."""
        count = f"{self.requests} requests" if self.requests is not None else f"{self.duration_s:g} s"
        burst = "" if self.burst is None else f", burst {self.burst}"
        return f"{count}, {self.concurrency} at a time, {self.input_len} in / {self.output_len} out{burst}"


def warm_up_of(load: Load) -> Load:
    """What a side answers before it is measured the first time: the same shapes, few tokens."""
    return Load(load.concurrency, load.input_len, output_len=8, requests=load.concurrency)


def failures(result: RunResult) -> list[RequestRecord]:
    """Requests that were not answered in full."""
    return [record for record in result.requests if record.error is not None]
