"""Finds the request that breaks steps: the requests of a failed step compute again in ever smaller groups, until one fails alone.

Groups are halved and tried in turn, so one culprit among ``n`` costs about ``2 * log2(n)`` steps. Successful steps are between
failed ones, so the loop's limit of consecutive failures is not reached. A group whose step succeeds is cleared. Pure state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

Key = tuple[str, int]


class Suspects:
    """Requests that were in a failed step and have not been in a successful one since."""

    def __init__(self) -> None:
        self._groups: deque[tuple[Key, ...]] = deque()

    @property
    def group(self) -> frozenset[Key] | None:
        """The only requests that may be in the next step; None: all."""
        return frozenset(self._groups[0]) if self._groups else None

    def blame(self, keys: Iterable[Key]) -> Key | None:
        """The next step failed with ``keys`` in it. Returns the culprit if there was only one. Otherwise they are tried again."""
        self.clear()
        suspects = tuple(dict.fromkeys(keys))  # the beams of a search share a key
        if len(suspects) == 1:
            return suspects[0]
        half = len(suspects) // 2
        self._groups.extend(group for group in (suspects[:half], suspects[half:]) if group)
        return None

    def clear(self) -> None:
        """The step with ``group`` succeeded, or none of the group can compute at present."""
        if self._groups:
            self._groups.popleft()
