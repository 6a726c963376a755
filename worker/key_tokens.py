"""Passes each gateway's token counts of API keys on to the other gateways, which cannot reach each other.

A gateway reports to one worker at a time, and that worker tells all other gateways at once. At its first report a gateway gets all
earlier reports that the worker knows, with their ages. So a new gateway also learns the counts of gateways that are gone.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvrelay.wire.messages import KeyTokens

_MAX_GATEWAYS = 256  # most gateways to remember, the latest reports


class KeyTokensBoard:
    """One worker's reports. Asyncio loop only."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._has_told: dict[str, bool] = {}  # connected gateways by ``peer_id``: whether each has reported
        self._told: dict[str, tuple[KeyTokens, float]] = {}  # by gateway process, latest last: (report, when it came)

    @property
    def gateways(self) -> list[str]:
        """The ``peer_id`` of each connected gateway."""
        return list(self._has_told)

    def join(self, peer_id: str) -> None:
        """A gateway has connected."""
        self._has_told[peer_id] = False

    def leave(self, peer_id: str) -> None:
        """A gateway is gone. Its reports stay."""
        self._has_told.pop(peer_id, None)

    def take(self, peer_id: str, told: KeyTokens, send: Callable[[str, KeyTokens], object]) -> None:
        """Keep a gateway's report and ``send`` it to the others. At its first report, also ``send`` it the known ones."""
        now_s = self._clock()
        for other in self._has_told:
            if other != peer_id:
                send(other, told)
        if not self._has_told.get(peer_id, True):
            self._has_told[peer_id] = True
            for known, heard_s in self._told.values():
                send(peer_id, msgspec.structs.replace(known, age_s=known.age_s + now_s - heard_s))
        self._told.pop(told.gateway, None)
        self._told[told.gateway] = told, now_s
        if len(self._told) > _MAX_GATEWAYS:
            del self._told[next(iter(self._told))]
