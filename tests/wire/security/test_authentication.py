"""CURVE on control links: a key decides the role of a peer, and peers without a key are refused."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvrelay.common.errors import SettingsError
from kvrelay.wire.codec import Codec
from kvrelay.wire.messages import Cancel, FailureCode, Hello, HelloRefused, Role, Welcome
from kvrelay.wire.security.authentication import WATCHED_EVENTS, ClientProof, PeerGate, show_token
from kvrelay.wire.security.keys import WireKeys, keys_of, make_keys
from kvrelay.wire.settings import SecuritySettings

from ..links import WAIT_S, Initiator, Net, Worker, next_of

GATEWAYS = frozenset({Role.GATEWAY})
BOTH = frozenset({Role.GATEWAY, Role.PREFILL})


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def gate_of(net: Net, directory: Path, roles: frozenset[Role] = BOTH) -> PeerGate:
    return PeerGate(WireKeys.load(directory, Role.DECODE), roles, net.metrics, net.context)


def proof_of(directory: Path, role: Role) -> ClientProof:
    return ClientProof(WireKeys.load(directory, role), Role.DECODE)


async def guarded(net: Net, directory: Path, roles: frozenset[Role] = BOTH) -> tuple[Worker, str]:
    worker = Worker()
    return worker, await net.server(worker, gate=gate_of(net, directory, roles)).start()


async def test_the_right_keys_talk(net: Net, directory: Path) -> None:
    worker, address = await guarded(net, directory)
    initiator = Initiator()
    client = net.client(address, initiator, proof=proof_of(directory, Role.PREFILL))
    assert isinstance(await next_of(initiator.events), Welcome)
    assert client.send(Cancel(request_id="r", attempt=1))
    assert await next_of(worker.heard) == ("p", Role.PREFILL, Cancel(request_id="r", attempt=1))


BROKEN_OFF = "it broke the handshake off: its key is none that we know for its role, or the connection was lost"
NOT_LET_IN = "it does not let our key in"


@pytest.mark.parametrize(
    ("client", "worker", "detail"),
    [
        # A stranger knows the worker's public key, which is no secret.
        ("stranger", "keys", NOT_LET_IN),
        ("a prefill worker", "keys for gateways", NOT_LET_IN),
        # Another process listens in the worker's place: the client's first message is encrypted for the real worker's key.
        ("a prefill worker", "other keys", BROKEN_OFF),
        ("a prefill worker", "no keys", "it has no keys, and we have"),
        ("no keys", "keys", "it asks for keys, and we have none"),
    ],
)
async def test_who_cannot_prove_what_he_is_gets_nothing_and_is_told_why(
    net: Net, directory: Path, tmp_path: Path, client: str, worker: str, detail: str
) -> None:
    make_keys(tmp_path / "other")
    if client == "stranger":
        (tmp_path / "other" / "decode.pem").write_bytes((directory / "decode.pem").read_bytes())
        (tmp_path / "other" / "decode.key").write_bytes((directory / "decode.key").read_bytes())
    of_worker, of_client = (
        tmp_path / "other" if one in ("stranger", "other keys") else directory for one in (worker, client)
    )
    roles = GATEWAYS if worker == "keys for gateways" else BOTH
    heard = Worker()
    gate = None if worker == "no keys" else gate_of(net, of_worker, roles)
    address = await net.server(heard, gate=gate).start()
    initiator = Initiator()
    net.client(address, initiator, proof=None if client == "no keys" else proof_of(of_client, Role.PREFILL))
    assert await next_of(initiator.events) == HelloRefused(code=FailureCode.PEER_LOST, detail=detail)
    assert (net.counted("refused_keys") >= 1) is (detail == NOT_LET_IN)
    assert heard.heard.empty()


async def test_without_a_key_there_is_no_word(net: Net, directory: Path) -> None:
    worker, address = await guarded(net, directory)
    stranger = net.raw(address)
    await stranger.say(Hello(role=Role.GATEWAY, peer_id="raw"))
    # A peer with a key is welcomed later: a message of the stranger would have arrived before.
    initiator = Initiator()
    net.client(address, initiator, proof=proof_of(directory, Role.GATEWAY), role=Role.GATEWAY)
    assert isinstance(await next_of(initiator.events), Welcome)
    assert worker.heard.empty()
    assert not await stranger.poll(0)
    assert net.counted("refused_messages", cause="malformed") == 0
    stranger.close()


async def test_nobody_is_more_than_the_key_says(net: Net, directory: Path) -> None:
    """A client with a gateway's key says Hello as a prefill worker. It is refused, and the real prefill worker stays linked."""
    worker, address = await guarded(net, directory)
    honest, liar = Initiator(), Initiator()
    net.client(address, honest, peer_id="p", proof=proof_of(directory, Role.PREFILL))
    assert isinstance(await next_of(honest.events), Welcome)
    net.client(address, liar, peer_id="q", proof=proof_of(directory, Role.GATEWAY), role=Role.PREFILL)
    refused = await next_of(liar.events)
    assert isinstance(refused, HelloRefused)
    assert refused.detail == "a prefill by its Hello, a gateway by its key"
    assert worker.lost.empty()


async def test_a_stolen_routing_id_brings_no_role_with_it(
    net: Net, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill worker leaves without Bye, and a gateway's key takes over its routing id. The message is refused by its role."""
    # The thief comes before the server looks who has left; later it would be refused as a peer that has not said Hello.
    monkeypatch.setattr("kvrelay.wire.control.server._BREAKS_S", 3600)
    worker, address = await guarded(net, directory)

    def speak(role: Role, message: Hello | Cancel) -> zmq.Socket[bytes]:
        dealer = net.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, b"the same")
        dealer.linger = int(WAIT_S * 1000)  # the message still leaves, and the context's end waits no longer
        proof_of(directory, role).guard(dealer)
        dealer.connect(address)
        dealer.send(Codec().encode(message))
        return dealer

    async with asyncio.timeout(WAIT_S):
        with speak(Role.PREFILL, Hello(role=Role.PREFILL, peer_id="p")) as dealer:
            while not dealer.poll(0):
                await asyncio.sleep(0.002)  # polls for the Welcome
        while not net.counted("refused_messages", cause="wrong_role"):
            # The routing id is in use until the server notices that the first connection has ended.
            with speak(Role.GATEWAY, Cancel(request_id="r", attempt=1)):
                await asyncio.sleep(0.1)
    assert worker.heard.empty()


async def test_keys_can_be_changed_one_side_at_a_time(net: Net, directory: Path, tmp_path: Path) -> None:
    """The worker has a new key, and the client's file has the old and the new one. The client tries both and connects."""
    make_keys(tmp_path / "new")
    both = (directory / "decode.pem").read_bytes() + (tmp_path / "new" / "decode.pem").read_bytes()
    (directory / "decode.pem").write_bytes(both)
    (directory / "decode.key").write_bytes((tmp_path / "new" / "decode.key").read_bytes())
    _, address = await guarded(net, directory)
    initiator = Initiator()
    net.client(address, initiator, proof=proof_of(directory, Role.PREFILL))
    assert isinstance(await next_of(initiator.events), Welcome)
    assert initiator.events.empty()  # the client does not report the key that did not fit


@pytest.mark.parametrize("shown", ["the token", "another token", "keys", "nothing"])
async def test_only_the_token_opens_the_data_port(
    net: Net, directory: Path, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    gate = gate_of(net, directory)
    await net.server(Worker(), gate=gate).start()  # which starts the gate
    port = net.context.socket(zmq.ROUTER)
    gate.guard_data(port)
    port.bind("tcp://127.0.0.1:0")
    sender = net.context.socket(zmq.DEALER)
    port.linger = sender.linger = 0
    if shown == "keys":
        proof_of(directory, Role.PREFILL).guard(sender)
    elif shown != "nothing":
        show_token(sender, gate.data_token if shown == "the token" else "f" * 64)
    monitor = zmq.asyncio.Socket.from_socket(sender.get_monitor_socket(WATCHED_EVENTS | zmq.EVENT_HANDSHAKE_SUCCEEDED))
    with caplog.at_level("DEBUG"):
        sender.connect(port.getsockopt_string(zmq.LAST_ENDPOINT))
        with contextlib.suppress(zmq.Again):  # the connection may be refused already
            sender.send(b"block", zmq.DONTWAIT)
        event = parse_monitor_message(await asyncio.wait_for(monitor.recv_multipart(), WAIT_S))["event"]
    is_let_in = shown == "the token"
    assert (event == zmq.EVENT_HANDSHAKE_SUCCEEDED) is is_let_in
    assert bool(await asyncio.to_thread(port.poll, WAIT_S * 1000 if is_let_in else 100)) is is_let_in
    assert net.counted("refused_tokens") == (1 if shown == "another token" else 0)
    assert ("without this process's token" in caplog.text) is (shown == "another token")
    assert gate.data_token not in caplog.text
    sender.disable_monitor()
    monitor.close(linger=0)
    sender.close()
    port.close()


async def test_the_data_port_is_shut_until_the_gate_stands(net: Net, directory: Path) -> None:
    """A decode worker's data socket listens before the gate runs. Until then no sender can connect."""
    gate = gate_of(net, directory)
    port, sender = net.context.socket(zmq.ROUTER), net.context.socket(zmq.DEALER)
    port.linger = sender.linger = 0
    gate.guard_data(port)
    port.bind("tcp://127.0.0.1:0")
    show_token(sender, "f" * 64)
    sender.connect(port.getsockopt_string(zmq.LAST_ENDPOINT))
    sender.send(b"block")
    assert not await asyncio.to_thread(port.poll, 200)
    sender.close()
    port.close()


async def test_a_gate_that_died_is_a_reason_to_restart(net: Net, directory: Path) -> None:
    gate = gate_of(net, directory)
    server = net.server(Worker(), gate=gate)
    await server.start()
    assert server.is_alive
    gate.pipe.send(b"TERMINATE")
    await asyncio.to_thread(gate.thread.join, WAIT_S)
    assert not server.is_alive  # no new peer could connect without the gate


class TestSettings:
    """On which addresses a worker may listen without keys."""

    @pytest.mark.parametrize(
        "address", ["tcp://0.0.0.0:7100", "tcp://10.1.2.3:7100", "tcp://*:7100", "tcp://[::]:7100"]
    )
    def test_beyond_this_machine_only_with_keys(self, address: str, directory: Path) -> None:
        with pytest.raises(SettingsError, match=r"without --keys anybody there could read"):
            keys_of(SecuritySettings(), Role.PREFILL, (address,))
        assert keys_of(SecuritySettings(insecure=True), Role.PREFILL, (address,)) is None
        assert keys_of(SecuritySettings(keys=str(directory)), Role.PREFILL, (address,)) is not None

    @pytest.mark.parametrize(
        "address", ["tcp://127.0.0.1:7100", "tcp://[::1]:7100", "tcp://localhost:1", "ipc:///tmp/x"]
    )
    def test_on_this_machine_also_without(self, address: str) -> None:
        assert keys_of(SecuritySettings(), Role.DECODE, (address, address)) is None

    def test_keys_seal_the_blocks_too(self, directory: Path) -> None:
        assert SecuritySettings(keys=str(directory)).seals_kv
        assert SecuritySettings(seal_kv=True).seals_kv
        assert not SecuritySettings().seals_kv
