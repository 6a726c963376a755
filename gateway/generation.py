"""One choice of a response: the relay's tokens as text, with stop strings, log probabilities, usage and timings.

Sits between :mod:`kvrelay.gateway.relay`, which knows tokens only, and the HTTP routes, which know formats only.
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
from kvrelay.gateway.output_text import OutputText, StopReason, TextOptions
from kvrelay.gateway.progress import GenerationRequest, OutputDelta
from kvrelay.gateway.relay import Relay
from kvrelay.gateway.soon import Soon
from kvrelay.gateway.tokenizer import Tokenizer
from kvrelay.wire.messages import Beam


class Generation(GenerationRequest, frozen=True, kw_only=True):
    """What to generate, complete and validated, and what of it its client sees."""

    text: TextOptions = msgspec.field(default_factory=TextOptions)
    is_silent: bool = False  # no output is wanted: the one token that is generated is left out

    @property
    def is_first(self) -> bool:
        """Whether this is the choice that the prompt is computed, and counted, for."""
        return self.sampling.choice == 0


class TextDelta(msgspec.Struct, frozen=True, gc=False):  # one per token, as OutputDelta
    """New text, with the tokens that came since the last delta (their text may still be held back)."""

    text: str
    tokens: list[SampledToken]
    finish_reason: FinishReason | None
    stop_reason: StopReason = None  # with the finish reason
    prompt_logprobs: list[SampledToken] | None = None  # with the first delta, if asked for
    beam: int = 0  # of a beam search: which of its results this is, whole


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
        self.tokenizer = tokenizer
        self._metrics = metrics
        self._clock = clock

    async def run_all(self, generations: Sequence[Generation], usages: Sequence[Usage], take: TakeNumbered) -> None:
        """Run them side by side; ``take`` gets the text of all as it comes, numbered. The first error ends all.

        As :meth:`run` else.
        """
        if len(generations) == 1:
            await self.run(generations[0], usages[0], partial(take, 0))
            return
        tasks = [
            asyncio.create_task(self.run(generation, usage, partial(take, index)))
            for index, (generation, usage) in enumerate(zip(generations, usages, strict=True))
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def run(self, generation: Generation, usage: Usage, take: Callable[[TextDelta], None]) -> None:
        """Give ``take`` the text of ``generation``, the last of it with a finish reason; fills ``usage``. Raises ApiError.

        ``take`` is called as tokens come, and must not wait; what it raises ends the generation, and comes out here. Cancel to
        give the generation up. A stop string ends the text in front of it, and the request. A beam search gives one delta for
        each of its results.
        """
        if generation.is_first:
            self._metrics.tokens.on_prompt(len(generation.prompt_token_ids))
        await self._relay.run(
            generation, _Text(generation, usage, take, self.tokenizer, self._metrics, self._clock).take
        )


class _Text:
    """What tokens of one generation become, as they come."""

    def __init__(
        self,
        generation: Generation,
        usage: Usage,
        take: Callable[[TextDelta], None],
        tokenizer: Tokenizer,
        metrics: GatewayMetrics,
        clock: Clock,
    ) -> None:
        self._generation = generation
        self._usage = usage
        self._take = take
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._clock = clock
        self._output = Soon(lambda: OutputText(tokenizer, generation.text, generation.sampling))

    def take(self, delta: OutputDelta) -> bool:
        """Pass its text on; whether more tokens are wanted. See :data:`kvrelay.gateway.attempt.Take`."""
        generation, usage, output = self._generation, self._usage, self._output.get()
        self._observe(delta)
        if delta.num_cached_tokens is not None and generation.is_first:
            num_more = max(0, delta.num_cached_tokens - usage.num_cached_tokens)
            usage.num_cached_tokens += num_more
            self._metrics.tokens.on_cached(num_more)
        if delta.beams is not None:
            for index, beam in enumerate(delta.beams):
                usage.num_output_tokens += len(beam.tokens)
                self._take(self._beam(index, beam))
            return self._ended()
        tokens, text = delta.tokens, ""
        if generation.is_silent:
            tokens = []
        else:
            text, num_taken = output.push(tokens)
            usage.num_output_tokens += num_taken
            tokens = tokens[:num_taken]
        if output.is_stopped:
            self._take(TextDelta(text, tokens, FinishReason.STOP, output.stop_reason, delta.prompt_logprobs))
            return self._ended()
        if delta.finish_reason is not None:
            text += output.finish(tokens[-1].token_id if tokens else None)
            reason = FinishReason.STOP if output.is_stopped else delta.finish_reason
            if generation.is_silent:
                reason = FinishReason.LENGTH
            self._take(TextDelta(text, tokens, reason, output.stop_reason, delta.prompt_logprobs))
            return self._ended()
        if text or tokens or delta.prompt_logprobs is not None:
            self._take(TextDelta(text, tokens, None, None, delta.prompt_logprobs))
        return True

    def _beam(self, index: int, beam: Beam) -> TextDelta:
        output = OutputText(self._tokenizer, self._generation.text, self._generation.sampling)
        text, _ = output.push(beam.tokens)
        text += output.finish(beam.tokens[-1].token_id if beam.tokens else None)
        return TextDelta(text, beam.tokens, beam.finish_reason, output.stop_reason, beam=index)

    def _observe(self, delta: OutputDelta) -> None:
        timings = self._generation.timings
        parts = {} if delta.timings is None else timings.on_parts(delta.timings)
        is_first = False
        if delta.tokens:
            gap_s = timings.on_tokens(self._clock())
            is_first = gap_s is None
            self._metrics.tokens.on_tokens(len(delta.tokens), gap_s)
        if parts or is_first:
            # Histograms take longer than all else that a token meets here, and a stream's client waits for the first one.
            asyncio.get_running_loop().call_soon(self._count_start, parts, is_first)

    def _count_start(self, parts: Mapping[str, float], is_first: bool) -> None:
        """New parts of the request's start, and whether its first token has come."""
        for name, value in parts.items():
            self._metrics.part_s.labels(name).observe(value)
        timings = self._generation.timings
        if is_first:
            assert timings.first_token_s is not None
            self._metrics.ttft_s.observe(timings.first_token_s - timings.received_s)

    def _ended(self) -> bool:
        """No more is wanted."""
        self._metrics.e2e_s.observe(self._clock() - self._generation.timings.received_s)
        return False
