"""How gateways hear what API keys use at other gateways: they cannot reach each other, but all of them reach every worker.

A gateway tells one worker at a time, which passes it on to all others at once. A gateway that tells for the first time gets what
the worker has heard before, with its age: so a gateway that starts knows what keys used at those that are gone by now.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvrelay.wire.messages import KeyTokens

_MAX_GATEWAYS = 256  # that are remembered; the last ones heard of


class KeyTokensBoard:
    """One worker's. Asyncio loop only."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._has_told: dict[str, bool] = {}  # by ``peer_id``: the gateways that are connected
        self._told: dict[str, tuple[KeyTokens, float]] = {}  # by gateway's process, the latest last; and when it came

    @property
    def gateways(self) -> list[str]:
        """Those that are connected, by ``peer_id``."""
        return list(self._has_told)

    def join(self, peer_id: str) -> None:
        """A gateway is connected."""
        self._has_told[peer_id] = False

    def leave(self, peer_id: str) -> None:
        """It is gone. What it told stays."""
        self._has_told.pop(peer_id, None)

    def take(self, peer_id: str, told: KeyTokens, send: Callable[[str, KeyTokens], object]) -> None:
        """Keep what a gateway tells; ``send`` it to the others, and to itself what it missed."""
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
