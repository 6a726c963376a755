"""Timing of links and leases, with the defaults that both ends of a connection are built for."""

from __future__ import annotations

from dataclasses import dataclass

SEAL_KV_HELP = (
    "encrypt and authenticate KV blocks between workers (AES-256-GCM); the same on prefill and decode workers"
)


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """How a control link notices that its peer is gone. All values in seconds."""

    ping_interval_s: float = 1.0  # a client sends Ping this often; the server answers with Status
    peer_timeout_s: float = 10.0  # silence after which a peer counts as lost
    hello_timeout_s: float = 5.0  # Hello without Welcome: try again with a new socket
    reconnect_max_s: float = 5.0  # bound of the backoff between two tries

    @property
    def keepalive_s(self) -> float:
        """How often something must be said on a link where nothing else is: a few times in ``peer_timeout_s``."""
        return self.peer_timeout_s / 3
