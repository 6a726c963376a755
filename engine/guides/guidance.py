"""Guided output: the interface between the workers' services and the compiler of guides.

Life cycle: a request with a guide reaches a worker, whose service asks a :class:`GuideCompiler` for the request's
:class:`~kvrelay.engine.step.sequence.GuideState`. When the state is ready, the sequence goes to the model thread. The engine fills
a mask from the state for every token, and ``Sequence.append`` tells it each sampled token. Only the compiler
(:mod:`kvrelay.engine.guides.compiler`) knows grammars.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.step.sequence import GuideState


@dataclass(frozen=True, slots=True)
class GuideRefusal:
    """Why there is no state. ``is_invalid``: the guide is at fault, and every worker would refuse it."""

    detail: str
    is_invalid: bool = True


GuideResult = GuideState | GuideRefusal


class GuideCompiler(Protocol):
    """Makes states. It works on its own threads and processes."""

    def start(self, sampling: SamplingParams, output: Seq[int], done: Callable[[GuideResult], None]) -> None:
        """Compile ``sampling.guide``, which must be set, and replay ``output``, the tokens so far without stop tokens.

        ``done`` is called exactly once, unless the compiler is closed before. It may be called on any thread, also before ``start``
        returns.
        """

    def close(self) -> None:
        """Stop compiling. Blocks until all its threads and processes have ended."""


class NoGuides:
    """A compiler that refuses all guides. Implements :class:`GuideCompiler`."""

    def __init__(self, why: str = "it was started without a compiler") -> None:
        self._why = why

    def start(self, sampling: SamplingParams, output: Seq[int], done: Callable[[GuideResult], None]) -> None:
        """See GuideCompiler."""
        done(GuideRefusal(f"this worker follows no guides: {self._why}"))

    def close(self) -> None:
        """See GuideCompiler."""
