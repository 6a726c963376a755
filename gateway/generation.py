"""One choice of a response: the relay's tokens as text, with stop strings, log probabilities, usage and timings.

Sits between :mod:`kvrelay.gateway.relay`, which knows tokens only, and the HTTP routes, which know formats only.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from kvrelay.common.sampling import FinishReason, SampledToken, SamplingParams
from kvrelay.gateway.detokenizer import Detokenizer
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.relay import GenerationRequest, OutputDelta, Relay
from kvrelay.gateway.stop import StopMatcher
from kvrelay.gateway.timings import RequestTimings
from kvrelay.gateway.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Generation:
    """What to generate, complete and validated."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    stops: tuple[str, ...] = ()
    timings: RequestTimings = field(default_factory=RequestTimings)  # filled while it runs
    timeout_s: float | None = None  # the client's own


class TextDelta(msgspec.Struct, frozen=True, gc=False):  # one per token, as OutputDelta
    """New text, with the tokens that came since the last delta (their text may still be held back)."""

    text: str
    tokens: list[SampledToken]
    finish_reason: FinishReason | None


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

    def __init__(self, relay: Relay, tokenizer: Tokenizer, metrics: GatewayMetrics) -> None:
        self._relay = relay
        self.tokenizer = tokenizer
        self._metrics = metrics

    async def run(self, generation: Generation, usage: Usage) -> AsyncGenerator[TextDelta]:
        """The text of ``generation``, its last delta with a finish reason; fills ``usage``. Raises ApiError.

        Close the iterator (``aclosing``) to cancel. A stop string ends the text in front of it, and the request.
        """
        request = GenerationRequest(
            generation.request_id,
            generation.prompt_token_ids,
            generation.sampling,
            generation.timings,
            generation.timeout_s,
        )
        # A tokenizer need not call a model's end tokens special; no client wants to read them.
        detokenizer = Detokenizer(self.tokenizer, generation.sampling.stop_token_ids)
        stop = StopMatcher(generation.stops)
        timings = generation.timings
        self._metrics.prompt_tokens.inc(len(generation.prompt_token_ids))
        async with aclosing(self._relay.generate(request)) as deltas:
            async for delta in deltas:
                self._observe(delta, timings)
                if delta.num_cached_tokens is not None:
                    usage.num_cached_tokens = max(usage.num_cached_tokens, delta.num_cached_tokens)
                text, num_taken = _until_stop(delta.tokens, detokenizer, stop)
                usage.num_output_tokens += num_taken
                tokens = delta.tokens[:num_taken]
                if stop.matched is not None:
                    self._metrics.e2e_s.observe(time.monotonic() - timings.received_s)
                    self._metrics.stop_strings.inc()
                    yield TextDelta(text, tokens, FinishReason.STOP)
                    return
                if delta.finish_reason is not None:
                    text += stop.push(detokenizer.finish())
                    text += stop.finish()
                    reason = FinishReason.STOP if stop.matched is not None else delta.finish_reason
                    self._metrics.e2e_s.observe(time.monotonic() - timings.received_s)
                    yield TextDelta(text, tokens, reason)
                    return
                if text or tokens:
                    yield TextDelta(text, tokens, None)

    def _observe(self, delta: OutputDelta, timings: RequestTimings) -> None:
        if delta.timings is not None:
            for name, value in timings.on_parts(delta.timings).items():
                self._metrics.part_s.labels(name).observe(value)
        if not delta.tokens:
            return
        before_s = timings.last_token_s
        timings.on_tokens()
        assert timings.last_token_s is not None
        if before_s is None:
            self._metrics.ttft_s.observe(timings.last_token_s - timings.received_s)
        else:
            self._metrics.itl_s.observe(timings.last_token_s - before_s)
        self._metrics.output_tokens.inc(len(delta.tokens))


def _until_stop(tokens: Sequence[SampledToken], detokenizer: Detokenizer, stop: StopMatcher) -> tuple[str, int]:
    """The text of ``tokens`` and how many of them count: up to the one that completes a stop string."""
    pieces: list[str] = []
    for index, token in enumerate(tokens):
        pieces.append(stop.push(detokenizer.push([token.token_id])))
        if stop.matched is not None:
            return "".join(pieces), index + 1
    return "".join(pieces), len(tokens)
