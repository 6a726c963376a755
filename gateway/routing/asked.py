"""A request as the line of :mod:`kvrelay.gateway.routing.admission` knows it. Only that module writes it once it waits."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrelay.common.fair_queue import Flow, Tags
from kvrelay.gateway.routing.forecast import Kind, kind_of


@dataclass(slots=True, eq=False)
class Asked:
    """What one request asks for."""

    num_prompt_tokens: int
    max_tokens: int
    num_to_compute: int = 0  # prompt tokens to compute, as last estimated
    flow: Flow = field(default_factory=Flow)
    is_follower: bool = False  # its client is already being answered with another choice of the prompt
    waited_s: float = 0.0  # how long it has waited before, of the time that it may wait
    spent_s: float = 0.0  # how much of the request's time went by otherwise
    check: Callable[[], None] | None = None  # raises if it may not be in the line; None: it may
    num_bytes: int = 0  # of files that it holds while it waits beside the line
    kind: Kind = field(init=False)
    num_tokens: float = field(init=False, default=0.0)  # of prompt and output, as estimated on arrival
    arrival_s: float = field(init=False, default=0.0)
    deadline_s: float = field(init=False, default=math.inf)
    tags: Tags = field(init=False, default_factory=Tags)
    is_called: asyncio.Event = field(
        init=False, default_factory=asyncio.Event
    )  # set when it is the first of the line, when workers have come or gone, or when it is pushed out
    is_pushed_out: bool = field(
        init=False, default=False
    )  # others before it took its place while as many waited as may, or as many bytes

    def __post_init__(self) -> None:
        self.kind = kind_of(self.num_prompt_tokens, self.max_tokens)


def too_heavy(line: Sequence[Asked], max_bytes: int) -> list[Asked]:
    """The last requests of the line without whose files the others have ``max_bytes`` or less."""
    heavy: list[Asked] = []
    excess = sum(asked.num_bytes for asked in line) - max_bytes
    for asked in reversed(line):
        if excess > 0 and asked.num_bytes:
            heavy.append(asked)
            excess -= asked.num_bytes
    return heavy


def last_newcomer(line: Sequence[Asked]) -> Asked | None:
    """The last request of the line whose client is not being answered yet: a full line refuses only those."""
    return next((asked for asked in reversed(line) if not asked.is_follower), None)
