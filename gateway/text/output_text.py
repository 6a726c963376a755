"""One sequence's tokens as the client's text: special tokens left out, stop strings found, nothing cut in half."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.gateway.text.tokenizer import Tokenizer

StopReason = str | int | None  # the stop string, or the client's stop token; None for a model's own end


class TextOptions(msgspec.Struct, frozen=True, gc=False):
    """What a client wants to see of its output."""

    stops: tuple[str, ...] = ()
    includes_stop: bool = False  # what ended the text is part of it
    keeps_special: bool = False  # special tokens are part of the text
    kept_ids: frozenset[int] = frozenset()  # special tokens that are, even so: what marks a tool call, for instance


class StopMatcher:
    """Watches one sequence's text for stop strings. What may be the beginning of one is held back.

    Of several stop strings the one that ends first counts (of those that end together, the longest), so the
    outcome depends on the text only and not on the pieces it came in.
    """

    def __init__(self, stops: Sequence[str], *, includes_stop: bool = False) -> None:
        """``includes_stop``: the stop string itself is part of the text."""
        self._stops = tuple(stop for stop in stops if stop)
        self._includes_stop = includes_stop
        self._held = ""
        self.matched: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> str:
        """Take new text in; returns what may be sent. After a match it returns nothing more."""
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
        keep = max(self._overlap(stop) for stop in self._stops)
        safe = self._held[: len(self._held) - keep]
        self._held = self._held[len(safe) :]
        return safe

    def finish(self) -> str:
        """The text is over: what was held back is no stop string."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins ``stop``."""
        for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:length]):
                return length
        return 0


class OutputText:
    """Takes tokens, gives text. After a stop string, ``is_stopped``, it takes no more."""

    def __init__(self, tokenizer: Tokenizer, options: TextOptions, sampling: SamplingParams) -> None:
        silent = frozenset() if options.keeps_special else tokenizer.skipped_ids - options.kept_ids
        if not options.includes_stop:
            # A tokenizer need not call a model's end tokens special; no client wants to read them.
            silent = silent.union(sampling.stop_token_ids)
        self._detokenizer = tokenizer.detokenizer(silent)
        self._stop = StopMatcher(options.stops, includes_stop=options.includes_stop)
        self._min_tokens = sampling.min_tokens if options.stops else 0
        self._stop_token_ids = frozenset(sampling.stop_token_ids) - frozenset(tokenizer.eos_ids)
        self._num_tokens = 0
        self.stop_reason: StopReason = None

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._stop.matched is not None

    def push(self, tokens: Sequence[SampledToken]) -> tuple[str, int]:
        """The text of ``tokens``, and how many of them count: up to the one that completes a stop string."""
        pieces: list[str] = []
        for index, token in enumerate(tokens):
            self._num_tokens += 1
            piece = self._detokenizer.push([token.token_id])
            if self._num_tokens < self._min_tokens:
                pieces.append(piece)  # a stop string that is complete before so many tokens does not count
                continue
            pieces.append(self._stop.push(piece))
            if self.is_stopped:
                self.stop_reason = self._stop.matched
                return "".join(pieces), index + 1
        return "".join(pieces), len(tokens)

    def finish(self, last_token_id: int | None) -> str:
        """What is left when the sequence is over; ``last_token_id`` ended it, if it was a stop token."""
        text = self._stop.push(self._detokenizer.finish()) + self._stop.finish()
        if self.is_stopped:
            self.stop_reason = self._stop.matched
        elif last_token_id in self._stop_token_ids:
            self.stop_reason = last_token_id
        return text
