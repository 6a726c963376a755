"""How the benchmark talks to an engine that has no HTTP server: one JSON object per line, on stdin and stdout.

Runs inside the peer's own environment, so it imports nothing but the standard library. The benchmark sends a job

    {"concurrency": 8, "requests": 32, "input_len": 128, "output_len": 64, "seed": 7}

and gets ``{"records": [{"sent_s": …, "finished_s": …, "token_s": [one time for each token or group of tokens], "tokens": 64}, …]}``
with times in seconds since the start of the job. The first line that an engine writes says that it is ready, and what it is:
``{"ready": {"engine": "…", "version": "…"}}``. Its own output goes to stderr, so that no library can disturb the protocol.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_FIRST_ID, _LAST_ID = 1000, 20000  # as `kvrelay bench --token-ids` has them: plain text in every model we know


@dataclass(frozen=True)
class Job:
    """So many requests, so many at a time. Lengths in tokens."""

    concurrency: int
    requests: int
    input_len: int
    output_len: int
    seed: int

    def prompts(self) -> list[list[int]]:
        """New random prompts for every seed."""
        chooser = random.Random(self.seed)
        ids = range(_FIRST_ID, _LAST_ID + 1)
        return [chooser.choices(ids, k=self.input_len) for _ in range(self.requests)]


def serve(info: dict[str, str], run: Callable[[Job], list[dict[str, Any]]], channel: int) -> None:
    """Answer jobs until stdin ends. ``channel`` is the file descriptor that ``take_stdout`` gave."""
    with os.fdopen(channel, "w", buffering=1) as answers:
        print(json.dumps({"ready": info}), file=answers)
        for line in sys.stdin:
            print(json.dumps({"records": run(Job(**json.loads(line)))}), file=answers)


def take_stdout() -> int:
    """Keep stdout for the protocol, and send whatever else writes there to stderr. Call it before libraries are loaded."""
    channel = os.dup(1)
    os.dup2(2, 1)
    return channel
