"""Settings of the wire: time-outs of links, who may connect, and the way that blocks take between workers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvrelay.common.settings import setting

KEYS_HELP = (
    "directory of keys (made by kvrelay keys): encrypts links between components and seals KV blocks; on all "
    "components or on none"
)
SERVED_MODEL_NAME_HELP = (
    "model name in the API. Default: the model directory's name. A gateway uses a worker with such a name for "
    "that model only"
)


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """How a control link notices that its peer is gone. All values in seconds."""

    ping_interval_s: float = 1.0  # a client sends Ping this often; the server answers with Status
    peer_timeout_s: float = 10.0  # silence after which a peer counts as lost
    hello_timeout_s: float = 5.0  # longest wait for Welcome after Hello; then a new socket tries again
    reconnect_max_s: float = 5.0  # bound of the backoff between two tries

    def between_workers(self) -> LinkSettings:
        """For links from prefill to decode workers: time-outs three times as long, because there may be thousands of idle links.

        A hung worker is noticed earlier by the gateway's own link to it, and by leases that run out.
        """
        return replace(self, ping_interval_s=self.peer_timeout_s, peer_timeout_s=3 * self.peer_timeout_s)


@dataclass(frozen=True, slots=True)
class SecuritySettings:
    """Who may connect to a worker, and what others on the network can read."""

    keys: str | None = setting(None, KEYS_HELP)
    insecure: bool = setting(
        False, "listen beyond this machine without --keys: whoever reaches the port can read, forge and cancel"
    )
    seal_kv: bool = setting(
        False,
        "encrypt and authenticate KV blocks between workers (AES-256-GCM), which --keys does anyway; the same on "
        "all workers",
    )

    @property
    def seals_kv(self) -> bool:
        """Whether KV blocks travel sealed."""
        return self.seal_kv or self.keys is not None


@dataclass(frozen=True, slots=True)
class SameHostSettings:
    """Whether KV blocks take a shorter way between workers on one host."""

    shared_memory: str = setting(
        "auto",
        "send KV blocks through shared memory to workers on this host. auto: on the same machine or pod. A "
        "directory: to all that have the same one (pods: a hostPath). off: TCP",
    )
