"""Guides for tests of the code around them. A guide's text is the only output that matches, as token ids such as ``"5 7
9"``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from kvrelay.common.sampling import Guide, GuideKind, SamplingParams
from kvrelay.engine.guides.guidance import GuideRefusal, GuideResult
from kvrelay.engine.step.sequence import GuideState


def tokens_guide(*token_ids: int) -> Guide:
    """A guide that allows exactly this output. At a -1 no token is allowed."""
    return Guide(kind=GuideKind.REGEX, text=" ".join(map(str, token_ids)))


def num_allowed(state: GuideState, draft: Seq[int]) -> int:
    """See GuideState. For states that can be copied."""
    state = copy.copy(state)
    for place, token_id in enumerate(draft):
        if state.is_complete:
            return place
        try:
            state.accept(token_id)
        except ValueError:
            return place
    return len(draft)


def fill_along(state: GuideState, bitmask: npt.NDArray[np.int32], draft: Seq[int]) -> None:
    """See GuideState. For states that can be copied."""
    state = copy.copy(state)
    for words, token_id in zip(bitmask, draft, strict=True):
        state.accept(token_id)
        if state.is_complete:
            return
        state.fill(words)


class TokensState:
    """Implements GuideState. All its tokens are forced."""

    def __init__(self, token_ids: list[int]) -> None:
        self.left = token_ids

    def fill(self, bitmask: npt.NDArray[np.int32]) -> None:
        bitmask[:] = 0
        if self.left[0] >= 0:
            bitmask.view(np.uint32)[self.left[0] // 32] = 1 << self.left[0] % 32

    def forced(self, most: int) -> tuple[int, ...]:
        return tuple(takewhile(lambda token_id: token_id >= 0, self.left[:most]))

    def num_allowed(self, draft: Seq[int]) -> int:
        return num_allowed(self, draft)

    def fill_along(self, bitmask: npt.NDArray[np.int32], draft: Seq[int]) -> None:
        fill_along(self, bitmask, draft)

    def accept(self, token_id: int) -> None:
        if token_id != self.left[0]:
            raise ValueError(f"{token_id} came instead of {self.left[0]}")
        self.left = self.left[1:]

    @property
    def is_complete(self) -> bool:
        return not self.left


class ChainState:
    """Implements GuideState for ``num_tokens`` tokens. Each token's allowed residue modulo 3 follows from the token
    before it. The first one is 0."""

    def __init__(self, num_tokens: int) -> None:
        self._num_left = num_tokens
        self._residue = 0

    def fill(self, bitmask: npt.NDArray[np.int32]) -> None:
        assert self._num_left > 0, "asked behind its end"
        may_come = np.arange(32 * len(bitmask)) % 3 == self._residue
        bitmask[:] = np.packbits(may_come, bitorder="little").view(np.int32)

    def forced(self, most: int) -> tuple[int, ...]:
        return ()

    def num_allowed(self, draft: Seq[int]) -> int:
        return num_allowed(self, draft)

    def fill_along(self, bitmask: npt.NDArray[np.int32], draft: Seq[int]) -> None:
        fill_along(self, bitmask, draft)

    def accept(self, token_id: int) -> None:
        if self._num_left == 0 or token_id % 3 != self._residue:
            raise ValueError(f"{token_id} came where {self._residue} modulo 3 must, with {self._num_left} to come")
        self._num_left -= 1
        self._residue = token_id // 3 % 3

    @property
    def is_complete(self) -> bool:
        return self._num_left == 0


class PlayedGuides:
    """Implements GuideCompiler. Answers when the test calls ``answer``, or at once."""

    def __init__(self, *, at_once: bool = False) -> None:
        self._at_once = at_once
        self._open: list[Callable[[], None]] = []
        self.is_closed = False

    @property
    def is_asked(self) -> bool:
        """Whether somebody waits for an answer."""
        return bool(self._open)

    def start(self, sampling: SamplingParams, output: Seq[int], done: Callable[[GuideResult], None]) -> None:
        assert sampling.guide is not None
        text = sampling.guide.text
        self._open.append(lambda: done(_state(text, output)))
        if self._at_once:
            self.answer()

    def answer(self) -> None:
        """Answer all open requests."""
        for tell in self._open:
            tell()
        self._open.clear()

    def close(self) -> None:
        self.is_closed = True


def _state(text: str, output: Seq[int]) -> GuideResult:
    if text == "bad":
        return GuideRefusal("'bad' is not a guide")
    if text == "broken":
        return GuideRefusal("the compiler is out of order", is_invalid=False)
    state = TokensState([int(one) for one in text.split()])
    try:
        for token_id in output:
            state.accept(token_id)
    except ValueError as error:
        return GuideRefusal(str(error))
    return state
