"""Stop strings: the text ends in front of the first one that is complete, and no part of one is ever sent."""

from __future__ import annotations

from collections.abc import Sequence


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
