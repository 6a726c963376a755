"""Makes the JSON bodies of planned requests: random token ids, or random words for text and chats.

The same seed makes the same prompts. A body is made right before its request is due: 100,000 tokens take about 6 ms.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np

from kvrelay.launcher.bench.settings import BenchSettings
from kvrelay.launcher.bench.values import parse_id_range
from kvrelay.launcher.bench.workload import PlannedRequest

# Each word is one token in common tokenizers.
WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system"),
    *("work", "number", "night", "point", "home", "water", "room", "mother", "area", "money", "story", "fact", "month"),
)


class BodyWriter:
    """Turns plans into bodies. Pure."""

    def __init__(self, settings: BenchSettings, model: str) -> None:
        """Needs a chosen prompt seed. Raises SettingsError on an invalid range of ids."""
        prompt = settings.prompt
        assert prompt.prompt_seed is not None, "chosen before"
        self._api = settings.target.api
        self._ids = parse_id_range(prompt.token_ids)
        self._prompt_seed = prompt.prompt_seed
        self._seed = prompt.seed
        self._fixed: dict[str, Any] = {
            "model": model,
            "temperature": prompt.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if prompt.ignore_eos:  # strict servers reject unknown fields
            self._fixed["ignore_eos"] = True

    def make(self, request: PlannedRequest) -> bytes:
        """The JSON body of ``request``."""
        body = self._fixed | {"max_tokens": request.output_tokens}
        if body["temperature"]:
            # Each request has its own seed: with one shared seed, the same prompt would always get the same answer.
            chooser = random.Random(f"{self._seed}/sampling/{request.stream}/{request.number}")  # noqa: S311
            body["seed"] = chooser.getrandbits(31)
        ids = self._ids if self._api == "completions" else range(len(WORDS))
        drawn: list[int] = []
        for piece in request.pieces:
            chosen = np.random.default_rng([self._prompt_seed, *piece.key.encode()])
            drawn += chosen.integers(ids.start, ids.stop, size=piece.length).tolist()
        if self._api == "completions":
            body["prompt"] = drawn
        elif self._api == "text":
            body["prompt"] = " ".join([WORDS[place] for place in drawn])
        else:
            body["messages"] = [{"role": "user", "content": " ".join([WORDS[place] for place in drawn])}]
        return msgspec.json.encode(body)
