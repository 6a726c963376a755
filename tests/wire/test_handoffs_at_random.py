"""Random hand-offs over real data sockets and rings: each ends once, and all blocks are released."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.wire.messages import Grant

from .lease_bench import BAD_PAYLOAD, Granted, offer_of, until
from .rig import Rig


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("seals_kv", [False, True], ids=["plain", "sealed"])
def test_hand_offs_at_random(make_rig: Callable[..., Rig], path: str, seals_kv: bool, seed: int) -> None:
    """Up to three hand-offs run at a time. They finish, are aborted by a side, get a block of another epoch, or lose their link."""
    rng = random.Random(seed)
    rig = make_rig(num_blocks=1024, seals_kv=seals_kv, path=path)
    opened: list[tuple[str, int]] = []
    for turn in range(12):
        fates: dict[int, str] = {}
        for number in range(rng.randrange(1, 4)):
            fate = rng.choice(["commit", "commit", "cancel", "abort", "stale"])
            offer = offer_of(rng.choices(range(1000), k=rng.randrange(1, 60)), f"{turn}-{number}")
            opened.append(rig.open(offer))
            (grant,) = rig.pump()
            assert isinstance(grant, Grant)
            fates[grant.lease_id] = fate
            if fate == "stale":
                stale = Granted(offer, grant).header(0, epoch=grant.epoch - 1)
                rig.link.data.send(stale, memoryview(BAD_PAYLOAD), None)
            rig.commit(opened[-1])
            if fate == "cancel":
                rig.table.cancel(*opened[-1])
            elif fate == "abort":
                rig.transfers.abort(opened[-1], "test")
            rig.pump()
        if rng.random() < 0.3:  # the link breaks while blocks may be on their way
            rig.senders[-1].close()
            rig.transfers.on_link_lost(rig.link)
            rig.table.abort_peer("p")
            rig.link, rig.line = rig.new_link()
            fates = dict.fromkeys(fates, "lost")
        await_ends(rig, fates)
    rig.settle()
    assert sorted(rig.transfer_ends.released) == sorted(opened)
    assert not +rig.source.reads
    rig.assert_all_free()


def await_ends(rig: Rig, fates: dict[int, str]) -> None:
    """Check that each lease ends once. A lease is verified with the right bytes unless its fate allows a rejection."""
    until(lambda: rig.ends.verified.qsize() + rig.ends.rejected.qsize() == len(fates), "leases without an end")
    while not rig.ends.verified.empty():
        lease = rig.verdict()
        del fates[lease.lease_id]
        rig.assert_holds(lease)
        rig.manager.release(Owner(OwnerKind.LEASE, lease.lease_key))
    while not rig.ends.rejected.empty():
        assert fates.pop(rig.rejection().lease_id) in ("cancel", "abort", "lost")
    assert fates == {}
    rig.manager.check_integrity()
