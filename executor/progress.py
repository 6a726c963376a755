"""One request's growing outputs, shared by the executor's thread, which writes, and readers on any thread or loop.

Readers take snapshots. A slow reader finds several tokens in one snapshot, and no queue grows.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvrelay.executor.outputs import CompletionOutput, Piece, RequestOutput, TokenLogprobs

CANCELLED = "cancelled"

Cursor = dict[int, tuple[int, int]]
"""Per output: the characters and tokens that a reader has seen."""


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
    """Thread-safe. The executor's thread writes it. It ends exactly once, with or without an error."""

    def __init__(self, request_id: str, prompt: str | None, num_outputs: int, *, tells_pieces: bool) -> None:
        """``tells_pieces``: wake readers for every piece, not only at the end."""
        self.request_id = request_id
        self.over: Future[None] = Future()  # done when the request is over, with its error if it failed
        self.first_news: Future[None] = Future()  # done when there is a first output
        self._news = self.first_news  # done when there is more than in the last snapshot
        self._prompt = prompt
        self._tells_pieces = tells_pieces
        self._lock = threading.Lock()
        self._growing = [_Growing() for _ in range(num_outputs)]
        self._prompt_token_ids: list[int] = []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._num_cached_tokens = 0
        self._is_over = False

    # -- what the executor writes ----------------------------------------------------------------------------------

    def on_prompt(
        self,
        token_ids: Sequence[int] | None = None,
        logprobs: list[TokenLogprobs | None] | None = None,
        num_cached_tokens: int = 0,
    ) -> None:
        """Set what is known of the prompt; omitted arguments keep their values. Readers see it with the next piece."""
        with self._lock:
            if token_ids is not None:
                self._prompt_token_ids = list(token_ids)
            if logprobs is not None:
                self._prompt_logprobs = logprobs
            self._num_cached_tokens = max(self._num_cached_tokens, num_cached_tokens)

    def add(self, index: int, piece: Piece) -> None:
        """Append to one output. The piece that completes the last output wakes readers only when the request is over."""
        with self._lock:
            self._growing[index].add(piece)
            if not self._tells_pieces or all(one.finish_reason is not None for one in self._growing):
                return
            news, self._news = self._news, Future()
        news.set_result(None)

    def finish(self, error: Exception | None = None) -> None:
        """End the request; does nothing if it has ended. Incomplete outputs count as cancelled.

        ``error``: raised to all readers of the result.
        """
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            for one in self._growing:
                one.finish_reason = one.finish_reason or CANCELLED
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)
        self._news.set_result(None)

    # -- what others read ------------------------------------------------------------------------------------------

    @property
    def is_cancelled(self) -> bool:
        """Whether the request ended without an error before all outputs were complete."""
        is_complete = all(one.finish_reason != CANCELLED for one in self._growing)
        return self.over.done() and self.over.exception() is None and not is_complete

    def snapshot(self, cursor: Cursor) -> tuple[RequestOutput, Future[None]]:
        """The outputs so far, where everything after ``cursor`` is new; moves ``cursor``.

        Also a future that is done when there is more.
        """
        with self._lock:
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
            return output, self._news


def _sum(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> float:
    known = [of_token.get(token_id) for token_id, of_token in zip(token_ids, logprobs, strict=True)]
    return sum(one.logprob for one in known if one is not None)
