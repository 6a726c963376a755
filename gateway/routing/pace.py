"""What requests cost, learnt from those that have ended: how much they generate, and how long they have their place.

Requests are of one kind if their prompts, and the numbers of tokens that they allow, are alike within a factor of four. What one
kind takes says nothing of another: a token of a prompt and a token of an answer are different work, in different pools. An
estimate is None as long as nothing is known of its kind, or nothing has been heard of it lately: after trouble, requests are
tried again rather than refused by what was measured in the trouble.

Pure state; the caller brings the time, in seconds on one clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_MEMORY = 32  # requests of a kind
_STALE_S = 10.0  # and as long as one request of the kind takes
_FIRST_GUESS_TOKENS = 128  # of output, before any request has ended

Kind = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Served:
    """One request that ended well. Times are from its place on workers on."""

    num_prompt_tokens: int
    num_output_tokens: int
    first_token_s: float
    end_s: float


class Pace:
    """Of one gateway."""

    def __init__(self) -> None:
        self._served: dict[Kind, deque[Served]] = {}
        self._heard_s: dict[Kind, float] = {}
        self._latest: deque[Served] = deque(maxlen=_MEMORY)  # of whatever kind

    def on_served(self, kind: Kind, served: Served, now_s: float) -> None:
        """One more has ended."""
        self._served.setdefault(kind, deque(maxlen=_MEMORY)).append(served)
        self._heard_s[kind] = now_s
        self._latest.append(served)

    def output_tokens(self, kind: Kind, max_tokens: int) -> float:
        """What a request of the kind generates, as far as one can know."""
        served = self._like(kind)
        if not served:
            return min(max_tokens, _FIRST_GUESS_TOKENS)
        return min(max_tokens, sum(one.num_output_tokens for one in served) / len(served))

    def durations_s(self, kind: Kind) -> list[float]:
        """How long those of its kind had their places, the shortest first; of all, if there are none; empty if nothing is known."""
        return sorted(one.end_s for one in self._like(kind))

    def is_known(self, kind: Kind, now_s: float) -> bool:
        """Whether somebody may be refused on an estimate."""
        if (served := self._served.get(kind)) is None:
            return False
        mean_s = sum(one.end_s for one in served) / len(served)
        return now_s - self._heard_s[kind] < _STALE_S + mean_s

    def service_s(self, kind: Kind, num_prompt_tokens: int, max_tokens: int, now_s: float) -> float | None:
        """How long a request takes from its place to its end; None if that is not known."""
        if not self.is_known(kind, now_s):
            return None
        served = self._served[kind]
        by_prompt_token = sum(one.first_token_s for one in served) / sum(one.num_prompt_tokens for one in served)
        by_output_token = sum(one.end_s - one.first_token_s for one in served) / sum(
            one.num_output_tokens for one in served
        )
        return num_prompt_tokens * by_prompt_token + self.output_tokens(kind, max_tokens) * by_output_token

    def _like(self, kind: Kind) -> deque[Served]:
        return self._served.get(kind, self._latest)


def kind_of(num_prompt_tokens: int, max_tokens: int) -> Kind:
    """Which requests are alike."""
    return (num_prompt_tokens.bit_length() // 2, max_tokens.bit_length() // 2)
