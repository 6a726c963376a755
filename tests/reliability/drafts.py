"""The drafters of a fleet's decode workers, and the sums of draft counters over all processes, ended ones included."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.first_layers import save_first_layers

from .fleet import Fleet

_LOOK_S = 1.0

Drafter = Callable[[Path, Path, Sequence[dict[str, Any]]], list[str]]
"""Takes the model, a directory that is not there yet, and the questions' bodies; returns a decode worker's flags."""


def look_up(*_: object) -> list[str]:
    """Speculation by look-up: there is no draft model."""
    return ["--speculation", "ngram"]


def first_layers(num_layers: int) -> Drafter:
    """A draft model of the model's first ``num_layers`` layers."""
    return functools.partial(_first_layers, num_layers)


def _first_layers(num_layers: int, model: Path, directory: Path, _: Sequence[dict[str, Any]]) -> list[str]:
    save_first_layers(model, directory, num_layers)
    return ["--speculation", "draft-model", "--draft-model", str(directory)]


def known_head(model: Path, directory: Path, bodies: Sequence[dict[str, Any]]) -> list[str]:
    """An EAGLE-3 head that is trained on the model's answers without an adapter."""
    from speculation_parts.known_head import save_known_head  # noqa: PLC0415 - seconds to import

    from kvrelay.executor import LLM, SamplingParams  # noqa: PLC0415

    names = ("temperature", "seed", "top_p", "max_tokens", "min_tokens", "stop")
    params = [SamplingParams(**{name: body[name] for name in names if name in body}) for body in bodies]
    with LLM(str(model), threads=1, kv_memory_mb=256, device="cpu") as llm:
        outputs = llm.generate([body["prompt"] for body in bodies], params)
    save_known_head(model, directory, [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs])
    return ["--speculation", "head", "--draft-model", str(directory)]


class DraftWatch:
    """Reads the counters of all decode workers periodically, and keeps the last ones of each process."""

    def __init__(self, up: Fleet) -> None:
        self._fleet = up
        self._seen: dict[int, tuple[float, float]] = {}  # by process: drafted and accepted tokens

    async def run(self) -> None:
        """Read the counters until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> None:
        """Read the counters now. A worker that does not answer keeps those of the last reading."""
        for member in self._fleet.of("decode"):
            pid = member.pid
            if member.ready_s is not None and await asyncio.to_thread(member.fetch, "/metrics", 1.0) is not None:
                counted = [
                    await asyncio.to_thread(member.counted, f"kvrelay_{kind}_tokens_total")
                    for kind in ("draft", "accepted_draft")
                ]
                if member.pid == pid and counted[0]:
                    self._seen[pid] = (counted[0], counted[1])

    @property
    def totals(self) -> tuple[float, float]:
        """Drafted and accepted tokens."""
        drafted, accepted = zip(*self._seen.values(), strict=True) if self._seen else ((), ())
        return sum(drafted), sum(accepted)
