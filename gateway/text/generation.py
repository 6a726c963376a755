"""One choice of a response: the relay's tokens as text, with stop strings, log probabilities, usage and timings.

Sits between :mod:`kvrelay.gateway.relay.relay`, which knows tokens only, and the HTTP routes, which know formats only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from kvrelay.common.clock import Clock
from kvrelay.common.sampling import FinishReason, SampledToken
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.relay.progress import GenerationRequest
from kvrelay.gateway.relay.relay import Relay
from kvrelay.gateway.relay.timings import RequestTimings
from kvrelay.gateway.text.output_text import OutputText, StopReason, TextOptions
from kvrelay.gateway.text.tokenizer import Tokenizer
from kvrelay.wire.messages import Beam, TokenDelta


class Generation(GenerationRequest, frozen=True, kw_only=True):
    """What to generate, complete and validated, and what of it its client sees."""

    text: TextOptions = msgspec.field(default_factory=TextOptions)
    is_silent: bool = False  # no output is wanted: the one token that is generated is left out

    @property
    def is_first(self) -> bool:
        """Whether this is the choice that the prompt is computed, and counted, for."""
        return self.sampling.choice == 0


class TextDelta(msgspec.Struct, frozen=True, gc=False):  # one per token: half a dataclass's cost, nothing to collect
    """New text, with the tokens that came since the last delta (their text may still be held back)."""

    text: str
    tokens: list[SampledToken]
    finish_reason: FinishReason | None
    stop_reason: StopReason = None  # with the finish reason
    prompt_logprobs: list[SampledToken] | None = None  # with the first delta, if asked for
    beam: int = 0  # of a beam search: which of its results this is, whole


TakeText = Callable[[TextDelta], None]
TakeNumbered = Callable[[int, TextDelta], None]
"""Takes what is new of one of several generations, and which. Must not wait."""


@dataclass(slots=True)
class Usage:
    """Token counts of one generation, filled while it runs."""

    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_cached_tokens: int = 0

    def body(self) -> dict[str, object]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


class Generator:
    """Turns generations into text, over one relay."""

    def __init__(self, relay: Relay, tokenizer: Tokenizer, metrics: GatewayMetrics, clock: Clock) -> None:
        self._relay = relay
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._clock = clock

    async def run_all(self, generations: Sequence[Generation], usages: Sequence[Usage], take: TakeNumbered) -> None:
        """Run them side by side; ``take`` gets the text of all as it comes, numbered, and ``usages`` are filled. Raises ApiError.

        ``take`` is called as tokens come, and must not wait; the last text of each has a finish reason. The first error ends all,
        also what ``take`` raises. Cancel to give them up. A stop string ends a text in front of it, and its request. A beam search
        gives one delta for each of its results.
        """
        runs = [
            self._run(generation, usage, partial(take, index))
            for index, (generation, usage) in enumerate(zip(generations, usages, strict=True))
        ]
        if len(runs) == 1:
            await runs[0]
            return
        tasks = [asyncio.create_task(run) for run in runs]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, generation: Generation, usage: Usage, take: TakeText) -> None:
        if generation.is_first:
            self._metrics.tokens.on_prompt(len(generation.prompt_token_ids))
        output = OutputText(self._tokenizer, generation.text, generation.sampling)
        await self._relay.run(generation, partial(self._take, generation, usage, output, take))

    def _take(
        self, generation: Generation, usage: Usage, output: OutputText, take: TakeText, delta: TokenDelta
    ) -> bool:
        """Pass its text on; whether more tokens are wanted. See :data:`kvrelay.gateway.relay.attempt.Take`."""
        self._observe(generation.timings, delta)
        if delta.num_cached_tokens is not None and generation.is_first:
            num_more = max(0, delta.num_cached_tokens - usage.num_cached_tokens)
            usage.num_cached_tokens += num_more
            self._metrics.tokens.on_cached(num_more)
        if delta.beams is not None:
            for index, beam in enumerate(delta.beams):
                usage.num_output_tokens += len(beam.tokens)
                take(self._beam(generation, index, beam))
            return self._ended(generation)
        tokens, text = delta.tokens, ""
        if generation.is_silent:
            tokens = []
        else:
            text, num_taken = output.push(tokens)
            usage.num_output_tokens += num_taken
            tokens = tokens[:num_taken]
        is_cut = output.is_stopped
        reason = FinishReason.STOP if is_cut else delta.finish_reason
        if reason is not None and not is_cut:
            text += output.finish(tokens[-1].token_id if tokens else None)
            if output.is_stopped:
                reason = FinishReason.STOP
            elif generation.is_silent:
                reason = FinishReason.LENGTH
        if reason is not None or text or tokens or delta.prompt_logprobs is not None:
            take(TextDelta(text, tokens, reason, output.stop_reason, delta.prompt_logprobs))
        return reason is None or self._ended(generation)

    def _beam(self, generation: Generation, index: int, beam: Beam) -> TextDelta:
        output = OutputText(self._tokenizer, generation.text, generation.sampling)
        text, _ = output.push(beam.tokens)
        text += output.finish(beam.tokens[-1].token_id if beam.tokens else None)
        return TextDelta(text, beam.tokens, beam.finish_reason, output.stop_reason, beam=index)

    def _observe(self, timings: RequestTimings, delta: TokenDelta) -> None:
        parts = {} if delta.timings is None else timings.on_parts(delta.timings)
        is_first = False
        if delta.tokens:
            gap_s = timings.on_tokens(self._clock())
            is_first = gap_s is None
            self._metrics.tokens.on_tokens(len(delta.tokens), gap_s)
        if parts or is_first:
            # Histograms take longer than all else that a token meets here, and a stream's client waits for the first one.
            asyncio.get_running_loop().call_soon(self._count_start, timings, parts, is_first)

    def _count_start(self, timings: RequestTimings, parts: Mapping[str, float], is_first: bool) -> None:
        """New parts of the request's start, and whether its first token has come."""
        for name, value in parts.items():
            self._metrics.part_s.labels(name).observe(value)
        if is_first:
            assert timings.first_token_s is not None
            self._metrics.ttft_s.observe(timings.first_token_s - timings.received_s)

    def _ended(self, generation: Generation) -> bool:
        """No more is wanted."""
        self._metrics.e2e_s.observe(self._clock() - generation.timings.received_s)
        return False
