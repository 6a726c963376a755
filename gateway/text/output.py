"""Turns one sequence's tokens into the client's text: leaves special tokens out, finds stop strings, cuts no character in half."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvrelay.common.clock import Clock
from kvrelay.common.sampling import FinishReason, SampledToken
from kvrelay.gateway.metrics import ModelMetrics
from kvrelay.gateway.relay.request import GenerationRequest, RequestTimings
from kvrelay.gateway.text.tokenizer import Tokenizer
from kvrelay.wire.messages import Beam, TokenDelta

StopReason = str | int | None  # the stop string, or the client's stop token; None for a model's own end


# One per token: costs half as much as a dataclass, and the garbage collector ignores it.
class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """New text, with the tokens that came since the last delta (their text may still be held back)."""

    text: str
    tokens: list[SampledToken]
    finish_reason: FinishReason | None
    stop_reason: StopReason = None  # set with the finish reason
    prompt_logprobs: list[SampledToken] | None = None  # set with the first delta, if asked for
    beam: int = 0  # index of a beam search's result, which the delta has as a whole


TakeText = Callable[[TextDelta], None]
"""Takes new text of one sequence. Must not wait."""


@dataclass(slots=True)
class Usage:
    """Token counts of one sequence, filled while it runs."""

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


def total(sequences: Sequence[GenerationRequest], usages: Sequence[Usage]) -> Usage:
    """The usage of all choices together. A prompt counts once."""
    return Usage(
        num_prompt_tokens=sum(len(one.prompt_token_ids) for one in sequences if one.is_first),
        num_output_tokens=sum(usage.num_output_tokens for usage in usages),
        num_cached_tokens=sum(usage.num_cached_tokens for usage in usages),
    )


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``marker``."""
    length = min(len(marker) - 1, len(text))
    while length > 0:
        length = marker.rfind(text[-1], 0, length) + 1  # no other length can match
        if text.endswith(marker[:length]):
            return length
        length -= 1
    return 0


class StopMatcher:
    """Watches one sequence's text for stop strings, and holds back text that may begin one.

    The stop string that ends first counts; of those that end together, the longest. So the result depends only on the text, not on
    its pieces.
    """

    def __init__(self, stops: Sequence[str], *, includes_stop: bool = False) -> None:
        """``includes_stop``: the stop string itself is part of the text."""
        self._stops = tuple(stop for stop in stops if stop)
        self._includes_stop = includes_stop
        self._held = ""
        self.matched: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> str:
        """Take new text; returns the text that may be sent. After a match it returns nothing more."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [(place + len(stop), place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            end, place, self.matched = min(found)
            safe, self._held = self._held[: end if self._includes_stop else place], ""
            return safe
        keep = max(overlap(self._held, stop) for stop in self._stops)
        safe = self._held[: len(self._held) - keep]
        self._held = self._held[len(safe) :]
        return safe

    def finish(self) -> str:
        """End the text; returns what was held back, which is no stop string."""
        held, self._held = self._held, ""
        return held


class OutputText:
    """Turns tokens into text. After a stop string (``is_stopped``) it takes no more."""

    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest) -> None:
        spec, sampling = request.spec, request.sampling
        silent: frozenset[int] = frozenset()
        if not spec.keeps_special:
            silent = tokenizer.skipped_ids.difference(map(tokenizer.token_id, spec.kept_tokens))
        if not spec.includes_stop:
            # Some tokenizers do not mark a model's end tokens as special, but no client wants to read them.
            silent = silent.union(sampling.stop_token_ids)
        self._detokenizer = tokenizer.detokenizer(silent, request.prompt_token_ids if spec.continues_text else ())
        self._stop = StopMatcher(spec.stops, includes_stop=spec.includes_stop)
        self._min_tokens = sampling.min_tokens if spec.stops else 0
        self._stop_token_ids = frozenset(sampling.stop_token_ids) - frozenset(tokenizer.eos_ids)
        self._num_tokens = 0
        self.stop_reason: StopReason = None

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stop.matched is not None

    def push(self, tokens: Sequence[SampledToken]) -> tuple[str, int]:
        """The text of ``tokens``, and how many of them count: up to the one that completes a stop string."""
        pieces: list[str] = []
        for index, token in enumerate(tokens):
            self._num_tokens += 1
            piece = self._detokenizer.push([token.token_id])
            if self._num_tokens < self._min_tokens:
                pieces.append(piece)  # a stop string that completes before min_tokens does not count
                continue
            pieces.append(self._stop.push(piece))
            if self.is_stopped:
                self.stop_reason = self._stop.matched
                return "".join(pieces), index + 1
        return "".join(pieces), len(tokens)

    def finish(self, last_token_id: int | None) -> str:
        """The rest of the text at the end. ``last_token_id``: the stop token that ended it, if one did."""
        text = self._stop.push(self._detokenizer.finish()) + self._stop.finish()
        if self.is_stopped:
            self.stop_reason = self._stop.matched
        elif last_token_id in self._stop_token_ids:
            self.stop_reason = last_token_id
        return text


class Output:
    """Passes one sequence's output to its client as text. A stop string ends the text before it, and the request."""

    def __init__(
        self,
        request: GenerationRequest,
        usage: Usage,
        take: TakeText,
        tokenizer: Tokenizer,
        metrics: ModelMetrics,
        clock: Clock,
    ) -> None:
        """``take`` gets the text as it arrives; its last delta has a finish reason. ``usage`` is filled.

        Of a beam search, ``take`` gets one delta for each of its results.
        """
        self._request = request
        self._usage = usage
        self._take = take
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._clock = clock
        self._text = OutputText(tokenizer, request)
        self._is_silent = request.is_silent

    def take(self, delta: TokenDelta) -> bool:
        """Pass new text on. Returns whether more tokens are wanted. See :data:`kvrelay.gateway.relay.attempt.Take`."""
        request, usage, output = self._request, self._usage, self._text
        self._observe(request.timings, delta)
        if delta.num_cached_tokens is not None and request.is_first:
            num_more = max(0, delta.num_cached_tokens - usage.num_cached_tokens)
            usage.num_cached_tokens += num_more
            self._metrics.tokens.on_cached(num_more)
        if delta.beams is not None:
            for index, beam in enumerate(delta.beams):
                usage.num_output_tokens += len(beam.tokens)
                self._take(self._beam(index, beam))
            return self._ended()
        tokens, text = delta.tokens, ""
        if self._is_silent:
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
            elif self._is_silent:
                reason = FinishReason.LENGTH
        if reason is not None or text or tokens or delta.prompt_logprobs is not None:
            self._take(TextDelta(text, tokens, reason, output.stop_reason, delta.prompt_logprobs))
        return reason is None or self._ended()

    def _beam(self, index: int, beam: Beam) -> TextDelta:
        output = OutputText(self._tokenizer, self._request)
        text, _ = output.push(beam.tokens)
        text += output.finish(beam.tokens[-1].token_id if beam.tokens else None)
        return TextDelta(text, beam.tokens, beam.finish_reason, output.stop_reason, beam=index)

    def _observe(self, timings: RequestTimings, delta: TokenDelta) -> None:
        num_tokens = delta.num_tokens
        if delta.timings is None and not num_tokens:
            return
        now_s = self._clock()
        parts = {} if delta.timings is None else timings.on_parts(delta.timings, now_s)
        is_first = False
        if num_tokens:
            gap_s = timings.on_tokens(now_s)
            is_first = gap_s is None
            self._metrics.tokens.on_tokens(num_tokens, gap_s)
        if parts or is_first:
            # Histograms take longer than everything else done for a token, and the client waits for the first one.
            asyncio.get_running_loop().call_soon(self._count_start, timings, parts, is_first)

    def _count_start(self, timings: RequestTimings, parts: Mapping[str, float], is_first: bool) -> None:
        """Count the new parts of the request's start, and its first token if ``is_first``."""
        for name, value in parts.items():
            self._metrics.part_s.labels(name).observe(value)
        if is_first:
            assert timings.first_token_s is not None
            self._metrics.ttft_s.observe(timings.first_token_s - timings.received_s)

    def _ended(self) -> bool:
        """Note the end; no more tokens are wanted."""
        self._metrics.e2e_s.observe(self._clock() - self._request.timings.received_s)
        return False
