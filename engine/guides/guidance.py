"""Output that must match something: the words between the workers' services and whatever compiles guides.

Life cycle: a request with a guide reaches a worker, whose service asks a :class:`GuideCompiler` for the request's
:class:`~kvrelay.engine.step.sequence.GuideState`. The sequence meets the model thread when the state is there. The engine fills a
mask from it for every token, and ``Sequence.append`` tells it the token that came. Compilation
(:mod:`kvrelay.engine.guides.compiler`) knows grammars; this module and the services do not.
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
    """Why there is no state. ``is_invalid``: it is the guide's fault, and every worker would say the same."""

    detail: str
    is_invalid: bool = True


GuideResult = GuideState | GuideRefusal


class GuideCompiler(Protocol):
    """Makes states. Its work happens on threads and in processes of its own."""

    def start(self, sampling: SamplingParams, output: Seq[int], done: Callable[[GuideResult], None]) -> None:
        """Compile ``sampling.guide``, which must be there, and replay ``output``, the tokens so far without stop tokens.

        ``done`` is called exactly once, unless the compiler is closed before: on any thread, maybe before ``start`` returns.
        """

    def close(self) -> None:
        """Stop compiling. Blocks until nothing of the compiler runs any more."""


class NoGuides:
    """A compiler that refuses all. Implements :class:`GuideCompiler`."""

    def __init__(self, why: str = "it was started without a compiler") -> None:
        self._why = why

    def start(self, sampling: SamplingParams, output: Seq[int], done: Callable[[GuideResult], None]) -> None:
        """See GuideCompiler."""
        done(GuideRefusal(f"this worker follows no guides: {self._why}"))

    def close(self) -> None:
        """See GuideCompiler."""
