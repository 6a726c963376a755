"""One attempt at a request on a pair of workers. A worker's message becomes output within the call that receives it.

A token goes from the worker's message to the client's connection through plain calls, without a queue, task or iterator. Switching
tasks would cost more than everything else that is done with a token. So nothing here may wait while it handles an event, and
neither may the receiver of the output. Only the attempt's end is awaited (:meth:`Attempt.run`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from kvrelay.gateway.metrics import ModelMetrics
from kvrelay.gateway.relay.failover import blamed_roles
from kvrelay.gateway.relay.placement import views
from kvrelay.gateway.relay.request import GenerationRequest, Place
from kvrelay.gateway.relay.taking_back import FindSooner, TakingBack
from kvrelay.gateway.routing.breaker import Trial
from kvrelay.gateway.workers.pool import WorkerPool
from kvrelay.gateway.workers.worker import AttemptEvent, DeadlinePassed, GaveUp, Worker, WorkerLost
from kvrelay.wire.messages import (
    Cancel,
    Cancelled,
    Failed,
    FailureCode,
    HandedOver,
    Preempted,
    Role,
    Submit,
    TokenDelta,
    Withdrawn,
)

_PROVED_TOKENS = 8

Take = Callable[[TokenDelta], bool]
"""Takes new output, counted over all attempts, and returns whether more is wanted. Must not wait."""


class AttemptFailedError(Exception):
    """An attempt ended without a finish reason; another attempt may follow."""

    def __init__(
        self,
        code: FailureCode,
        detail: str,
        blamed: Sequence[str] = (),
        retry_after_s: float | None = None,
        about: str | None = None,
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.about = about  # as in Failed
        self.blamed = blamed  # the address of a worker, or the addresses of a pair, to avoid for a while
        self.retry_after_s = retry_after_s


class AttemptMovedError(Exception):
    """The attempt is given up for a place elsewhere. The message is the outcome in the metrics."""


class Attempt:
    """One attempt. Call ``run`` once. Lives on the gateway's asyncio loop."""

    def __init__(
        self,
        pool: WorkerPool,
        request: GenerationRequest,
        place: Place,
        take: Take,
        metrics: ModelMetrics,
        trial: Trial,
    ) -> None:
        """``trial`` is told what succeeds. Its maker tells it when the attempt is over."""
        self._trial = trial
        # So many output tokens prove that the decode worker generates.
        self._proved_len = len(request.output) + _PROVED_TOKENS
        self._is_proved = False
        self._pool = pool
        self._metrics = metrics
        self._request = request
        self._take = take
        self._involved = place.workers
        self._decode = place.decode
        self._prefill = place.prefill
        self._taking_back: TakingBack | None = None  # while the prompt may be taken back
        self._is_handed_over = False
        # Tokens that are there before the prompt's log probabilities, which another worker sends.
        self._early: list[TokenDelta] = []
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._error: Exception | None = None  # why the attempt ended
        self.is_finished = False  # all output has been taken
        self._find_room: Callable[[], Place | None]

    async def run(
        self, submit: Submit, now_s: float, find_room: Callable[[], Place | None], find_sooner: FindSooner
    ) -> None:
        """Submit the request. Returns when all its output was taken, or as much as was wanted. Cancel to give it up.

        ``find_room`` is asked for another decode worker when this one runs out of KV blocks, until the request has moved once.
        ``find_sooner`` is asked for a decode worker that computes the prompt sooner, while the prompt waits, until it was asked
        back once.
        Raises AttemptFailedError, AttemptMovedError, ApiError if no other attempt can help, and what ``take`` raises.
        """
        self._find_room = find_room
        request, involved, first = self._request, self._involved, self._involved[0]
        key = submit.key
        accept_s = request.timings.on_submit(now_s)
        # Sent first, because the client waits. No answer is handled before this coroutine awaits.
        if not first.client.send(submit):
            raise AttemptFailedError(FailureCode.PEER_LOST, "the worker's link just went down", (first.address,))
        if accept_s is not None:
            self._metrics.part_s.labels("accept").observe(accept_s)
        self._pool.open_attempt(key, involved, len(submit.token_ids) + 1, self._on_event, request.prefix.cached)
        if self._prefill is not None and not request.was_asked_back:
            self._taking_back = TakingBack(self._pool, request, key, self._prefill, find_sooner)
        timer = asyncio.get_running_loop().call_at(request.deadline_s, self._on_event, DeadlinePassed())
        try:
            await self._end
            if self._error is not None:
                raise self._error
        finally:
            timer.cancel()
            self._stay()
            for view in views([self._decode], 0):  # the K/V of the last token are not computed
                request.prefix.on_end(request.output[:-1], view)
            self._pool.close_attempt(key, involved, submit.num_prompt_tokens + len(request.output))
            if not self.is_finished:
                for worker in involved:
                    worker.client.send(Cancel(request_id=key[0], attempt=key[1]))

    def _on_event(self, event: AttemptEvent) -> None:
        """Handle an event of this attempt. Never raises; ignores events after the end."""
        if self._end.done():
            return
        try:
            is_over = self._on_tokens(event) if isinstance(event, TokenDelta) else self._on_news(event)
        except Exception as error:
            self._error, is_over = error, True
        if is_over:
            self._end.set_result(None)

    def _on_tokens(self, item: TokenDelta) -> bool:
        """Whether the attempt is over. If the prompt's log probabilities are asked for, no token of any choice precedes them."""
        if not self._request.lacks_prompt_logprobs:
            return self._on_next(item)
        if item.prompt_logprobs is None:
            self._early.append(item)
            return False
        early, self._early = self._early, []
        return any(self._on_next(one) for one in (item, *early))

    def _on_next(self, item: TokenDelta) -> bool:
        """Pass the new part of ``item`` on. Whether the attempt is over."""
        delta = self._accept(item)
        self.is_finished = item.finish_reason is not None
        is_wanted = delta is None or self._take(delta)
        is_over = self.is_finished or not is_wanted
        if not self._is_proved and (is_over or len(self._request.output) >= self._proved_len):
            self._is_proved = True
            self._trial.decode_succeeded()
        if item.timings is not None:  # after the token, because a client waits for it
            self._on_first_token(item)
        return is_over

    def _on_news(self, event: AttemptEvent) -> bool:
        """Whether the attempt is over."""
        match event:
            case HandedOver():
                self._is_handed_over = True
                self._on_verified(self._request.output)
            case Preempted():
                self._move()
            case Withdrawn() if self._taking_back is not None and self._request.was_asked_back:
                place = self._taking_back.place
                self._request.place = place if place is not None and place.decode.is_usable else None
                raise AttemptMovedError("taken_back")
            case DeadlinePassed():
                raise self._request.timed_out()
            case WorkerLost(role=Role.PREFILL) | GaveUp(role=Role.PREFILL) if self._is_handed_over:
                pass  # the decode worker owns the request: the loss or failure of the prefill worker no longer matters
            case _:
                raise _failure(event, self._involved)
        return False

    def _move(self) -> None:
        """Move the request if another worker has room; else it waits for room on its decode worker."""
        if not self._request.has_moved and (place := self._find_room()) is not None:
            self._request.has_moved, self._request.place = True, place
            raise AttemptMovedError("moved")

    def _stay(self) -> None:
        """Stop trying to take the prompt back."""
        if self._taking_back is not None:
            self._taking_back.end()
            self._taking_back = None

    def _on_first_token(self, item: TokenDelta) -> None:
        """A worker has computed the prompt, or the decode worker's own stream begins."""
        assert item.timings is not None
        # Only a decode worker that has verified the K/V reports this.
        self._is_handed_over |= item.timings.transfer_s is not None
        self._stay()
        self._pool.on_first_token((item.request_id, item.attempt), self._involved)
        computed = self._request.output[: item.index]
        for view in views(self._involved[:1], 0):
            self._request.prefix.on_cached(computed, view)
        if self._is_handed_over or len(self._involved) == 1:
            self._on_verified(computed)

    def _on_verified(self, output: Sequence[int]) -> None:
        """The K/V of the prompt and ``output`` are on the decode worker."""
        self._trial.hand_over_succeeded()
        self._request.settle(self._decode.address)
        for view in views([self._decode], 0):
            self._request.prefix.on_cached(output, view)

    def _accept(self, item: TokenDelta) -> TokenDelta | None:
        """The new part of ``item``; None if nothing is new."""
        request = self._request
        num_known = len(request.output)
        if item.index > num_known:
            raise AttemptFailedError(
                FailureCode.INTERNAL, f"tokens from position {item.index} on came after {num_known} tokens"
            )
        tokens = item.tokens[num_known - item.index :] if item.index < num_known else item.tokens
        request.output.extend([token.token_id for token in tokens])
        if tokens:
            request.waits_since_s = None
        if item.beams is not None:
            request.num_beam_tokens = item.num_tokens
        if not tokens and item.finish_reason is None and item.timings is None:
            return None
        if item.num_cached_tokens is not None:
            # A later attempt finds the tokens cached that an earlier one computed. They still count as computed for this
            # request.
            known = request.num_cached_tokens
            request.num_cached_tokens = item.num_cached_tokens if known is None else min(known, item.num_cached_tokens)
        num_cached_tokens = None if item.num_cached_tokens is None else request.num_cached_tokens
        prompt_logprobs = None if request.has_prompt_logprobs else item.prompt_logprobs
        request.has_prompt_logprobs |= prompt_logprobs is not None
        return msgspec.structs.replace(
            item, tokens=tokens, num_cached_tokens=num_cached_tokens, prompt_logprobs=prompt_logprobs
        )


def _failure(event: AttemptEvent, involved: Sequence[Worker]) -> AttemptFailedError:
    match event:
        case GaveUp(role=role, answer=Failed(code=code, detail=detail, retry_after_s=retry_after_s, about=about)):
            blamed = [w.address for w in involved if w.role in blamed_roles(code, role)]
            return AttemptFailedError(code, detail, blamed, retry_after_s, about)
        case GaveUp(answer=Cancelled()) | Withdrawn():
            return AttemptFailedError(FailureCode.PEER_LOST, "the worker gave the request up")
        case WorkerLost(address=address, reason=reason):
            # Not used again before it is up again.
            return AttemptFailedError(FailureCode.PEER_LOST, f"{address}: {reason}")
        case _:
            raise AssertionError(f"unexpected {event}")
