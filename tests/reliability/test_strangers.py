"""A short run of strangers at every port of real workers, and a check that no log contains the data port's token."""

from __future__ import annotations

import secrets
from pathlib import Path

import zmq

from kvrelay.engine.fake.engine import fake_card
from kvrelay.wire.codec import Codec
from kvrelay.wire.messages import Hello, Role, Welcome
from kvrelay.wire.security.authentication import ClientProof
from kvrelay.wire.security.keys import WireKeys, make_keys

from ..relay.http_gateway import VOCAB
from ..wire.shared_peer import SharedPeer
from .doors import TURNED_AWAY_S, Door, doors_of
from .neighbour import neighbour_of, small_fleet
from .strangers import visit, visit_workers

FAKE_TOKEN_NBYTES = 1024  # the default, which small_fleet() uses
NUM_CONNECTIONS = 400
NUM_TOO_MANY = 150


async def test_with_keys_nobody_else_comes_in(tmp_path: Path) -> None:
    """Strangers visit all ports. Only a prefill worker gets the data port's token, and no log contains it at debug level."""
    keys = tmp_path / "keys"
    make_keys(keys)
    async with small_fleet(tmp_path, keys=keys, log_level="debug") as up:
        doors = doors_of(up, keys)
        control, data = doors[1:]
        async with neighbour_of(up) as neighbour:
            await visit(up, neighbour, 1, NUM_CONNECTIONS, doors, [data])
        token = _welcome_of(control, Role.PREFILL).data_token
        assert token is not None
        assert len(token) == 64
        assert _welcome_of(control, Role.GATEWAY).data_token is None
        assert _welcome_of(control, Role.GATEWAY).shared_memory is None
        name = _welcome_of(control, Role.PREFILL).shared_memory
        assert name is not None
        with SharedPeer(name) as stranger:
            assert "not the token of this process's data port" in str(stranger.greet(512))
        assert any("go through shared memory" in worker.log.read_text() for worker in up.workers)
        assert not any(token in member.log.read_text() for member in up.members.values())


async def test_without_keys_strangers_are_bounded(tmp_path: Path) -> None:
    assert await visit_workers(tmp_path, None, 2, NUM_CONNECTIONS, NUM_TOO_MANY)


def _welcome_of(door: Door, role: Role) -> Welcome:
    """The decode worker's Welcome to a peer of this role."""
    assert door.keys is not None
    layout = fake_card(model_id="fake-model", block_size=16, token_nbytes=FAKE_TOKEN_NBYTES, vocab_size=VOCAB).layout
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.setsockopt(zmq.ROUTING_ID, b"\1" + secrets.token_bytes(16))
        ClientProof(WireKeys.load(door.keys, role), Role.DECODE).guard(dealer)
        dealer.connect(door.address)
        dealer.send(Codec().encode(Hello(role=role, peer_id="p", layout=layout, seals_kv=True)))
        assert dealer.poll(TURNED_AWAY_S * 1000)
        welcome = Codec().decode(dealer.recv())
    assert isinstance(welcome, Welcome), welcome
    return welcome
