"""What tests of hand-offs do over and over, as a prefill worker or as somebody else; ``rig`` is that of conftest."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from kvrelay.common.sampling import SampledToken
from kvrelay.wire.messages import Commit, Grant, Timings

from .rig import BLOCK_NBYTES, content_of
from .shared_peer import SharedPeer

NUM_TOKENS = 10  # two full blocks and a partial one
BAD_PAYLOAD = b"\xee" * BLOCK_NBYTES


def hand_over(rig: Any, num_tokens: int = NUM_TOKENS, request_id: str = "r") -> Any:
    """A whole hand-off; returns the verified lease, whose blocks are still leased."""
    key, _ = rig.granted(num_tokens, request_id)
    rig.commit(key)
    rig.pump()
    lease = rig.verdict()
    rig.settle()
    return lease


def send_raw(rig: Any, *frames: bytes) -> None:
    """Frames as any peer might send them; through shared memory always two of them."""
    if rig.path == "shared_memory":
        peer = rig.peers.enter_context(SharedPeer(rig.shared.name))  # open until the end: to close might take it back
        assert peer.greet(BLOCK_NBYTES) is None
        peer.send(0, *frames)
        return
    with rig.context.socket(zmq.DEALER) as socket:
        socket.linger = 1000
        socket.connect(rig.receiver.address)
        socket.send_multipart(frames)


def offer_for(rig: Any, num_tokens: int = NUM_TOKENS) -> tuple[Any, Any]:
    """A granted lease without a transfer: the test plays the sender."""
    offer = rig.offer_of(list(range(num_tokens)))
    grant = rig.leases.offer("p", offer)
    assert isinstance(grant, Grant)
    return offer, grant


def send_block(rig: Any, offer: Any, grant: Any, index: int, payload: bytes | None = None) -> None:
    """A right block, or a right header in front of another payload of the header's making."""
    right = content_of(offer.block_hashes[index])
    packed = rig.header(grant, offer, index).pack(memoryview(right))
    send_raw(rig, packed, right if payload is None else payload)


def commit_of(offer: Any, grant: Any, **changes: Any) -> Commit:
    commit = Commit(
        lease_id=grant.lease_id,
        epoch=grant.epoch,
        chain_hash=offer.block_hashes[-1],
        first_token=SampledToken(1),
        num_cached_tokens=0,
        timings=Timings(),
    )
    return msgspec.structs.replace(commit, **changes)
