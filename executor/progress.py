"""One request's outputs as they grow, between the executor's thread, which writes, and whoever waits, on any thread or loop.

A version counts what waiters should hear of. Those who read take a snapshot: a slow reader finds several tokens in one, and nothing
piles up for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrelay.executor.outputs import CompletionOutput, Piece, RequestOutput, TokenLogprobs

CANCELLED = "cancelled"

Cursor = dict[int, tuple[int, int]]
"""By output: characters and tokens that a reader has seen."""


@dataclass(slots=True)
class _Growing:
    """One output."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.token_ids += piece.token_ids
        if piece.logprobs is not None:
            self.logprobs = (self.logprobs or []) + list(piece.logprobs)
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason

    def snapshot(self, index: int, seen: tuple[int, int]) -> CompletionOutput:
        num_characters, num_tokens = seen
        logprobs = None if self.logprobs is None else list(self.logprobs)
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=list(self.token_ids),
            cumulative_logprob=None if logprobs is None else _sum(self.token_ids, logprobs),
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            text_diff=self.text[num_characters:],
            token_ids_diff=self.token_ids[num_tokens:],
            logprobs_diff=None if logprobs is None else logprobs[num_tokens:],
        )


class Progress:
    """Thread-safe. Written by the executor's thread; is over exactly once, with an error or without."""

    def __init__(self, request_id: str, prompt: str | None, num_outputs: int, *, tells_pieces: bool) -> None:
        """``tells_pieces``: waiters hear of every piece, and not only of the end."""
        self.request_id = request_id
        self._prompt = prompt
        self._tells_pieces = tells_pieces
        self._changed = threading.Condition()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._callbacks: list[Callable[[], None]] = []
        self._version = 0
        self._growing = [_Growing() for _ in range(num_outputs)]
        self._prompt_token_ids: list[int] = []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._num_cached_tokens = 0
        self._is_over = False
        self._error: Exception | None = None

    # -- what the executor writes ----------------------------------------------------------------------------------

    def on_prompt(
        self,
        token_ids: Sequence[int] | None = None,
        logprobs: list[TokenLogprobs | None] | None = None,
        num_cached_tokens: int = 0,
    ) -> None:
        """Something is known of the prompt; what is left out stays as it is. Waiters hear of it with the next piece."""
        with self._changed:
            if token_ids is not None:
                self._prompt_token_ids = list(token_ids)
            if logprobs is not None:
                self._prompt_logprobs = logprobs
            self._num_cached_tokens = max(self._num_cached_tokens, num_cached_tokens)

    def add(self, index: int, piece: Piece) -> None:
        """One output grows. Waiters hear of the piece that completes the last one when it is over."""
        with self._changed:
            self._growing[index].add(piece)
            if not self._tells_pieces or all(one.finish_reason is not None for one in self._growing):
                return
            waiters = self._advance()
        _wake(waiters)

    def finish(self) -> None:
        """It is over; outputs that are not complete were cancelled. Does nothing if it was over."""
        self._end(None)

    def fail(self, error: Exception) -> None:
        """It is over: ``error`` is raised to all who read the result. Does nothing if it was over."""
        self._end(error)

    # -- what others read ------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self._is_over

    @property
    def version(self) -> int:
        """Of what waiters have heard; 0 is nothing."""
        return self._version

    @property
    def is_cancelled(self) -> bool:
        """Whether it ended before some output was complete, and without an error."""
        with self._changed:
            return self._is_over and any(one.finish_reason == CANCELLED for one in self._growing)

    @property
    def error(self) -> Exception | None:
        """Why it failed, once it has."""
        return self._error

    def snapshot(self, cursor: Cursor) -> tuple[RequestOutput, int]:
        """The outputs so far, new is what is behind ``cursor``, which moves; and the version, for those who wait for the next."""
        with self._changed:
            outputs = [one.snapshot(index, cursor.get(index, (0, 0))) for index, one in enumerate(self._growing)]
            for index, one in enumerate(self._growing):
                cursor[index] = (len(one.text), len(one.token_ids))
            output = RequestOutput(
                request_id=self.request_id,
                prompt=self._prompt,
                prompt_token_ids=self._prompt_token_ids,
                prompt_logprobs=self._prompt_logprobs,
                outputs=outputs,
                finished=self._is_over,
                num_cached_tokens=self._num_cached_tokens,
            )
            return output, self._version

    def wait_over(self, timeout_s: float | None) -> bool:
        """Block until it is over; False if that takes longer than ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_over, timeout_s)

    def wait_news(self, version: int) -> None:
        """Block until there is more than ``version``."""
        with self._changed:
            self._changed.wait_for(lambda: self._version > version)

    async def news(self, version: int) -> None:
        """Returns when there is more than ``version``, on the running loop, whichever that is."""
        waiter = (asyncio.get_running_loop(), asyncio.get_running_loop().create_future())
        with self._changed:
            if self._version > version:
                return
            self._waiters.append(waiter)
        try:
            await waiter[1]
        finally:
            with self._changed, contextlib.suppress(ValueError):  # whoever woke us has taken it away
                self._waiters.remove(waiter)

    def when_over(self, callback: Callable[[], None]) -> None:
        """``callback`` is called once, when it is over: on the executor's thread, or at once if that is past."""
        with self._changed:
            if not self._is_over:
                self._callbacks.append(callback)
                return
        callback()

    def _end(self, error: Exception | None) -> None:
        with self._changed:
            if self._is_over:
                return
            self._is_over, self._error = True, error
            for one in self._growing:
                one.finish_reason = one.finish_reason or CANCELLED
            waiters = self._advance()
            callbacks, self._callbacks = self._callbacks, []
        _wake(waiters)
        for callback in callbacks:
            callback()

    def _advance(self) -> list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]]:
        """A new version; returned are those to wake on their loops."""
        self._version += 1
        self._changed.notify_all()
        waiters, self._waiters = self._waiters, []
        return waiters


def _wake(waiters: Sequence[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]]) -> None:
    for loop, future in waiters:
        with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits there any more
            loop.call_soon_threadsafe(_settle, future)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _sum(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> float:
    known = [of_token.get(token_id) for token_id, of_token in zip(token_ids, logprobs, strict=True)]
    return sum(one.logprob for one in known if one is not None)
