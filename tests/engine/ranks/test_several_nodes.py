"""A worker whose ranks are on several nodes: its results, admission of ranks, and its end when a part of it fails.

The nodes are processes of this machine that share only loopback addresses.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import transformers

import kvrelay
from kvrelay.common.errors import ModelError, SettingsError
from kvrelay.engine.ranks.door import Door
from kvrelay.engine.ranks.host import RankHost
from kvrelay.engine.ranks.link import Link, sealed_link
from kvrelay.engine.ranks.messages import FromLeader, Hello, Refused
from kvrelay.engine.ranks.nodes import HostDirectories, NodePlace, OtherNodes
from kvrelay.engine.step.interface import DeviceFailedError
from tests.engine.conftest import SIZES, assert_same_tokens, load, save_model
from tests.processes import is_alive

from .conftest import load_ranks
from .rig import ROUNDING, SOON_S, expect_signs_within, expect_what_one_rank_gives, run, wait_until

SECRET = secrets.token_bytes(32)
ROOT = Path(__file__).parents[3]


def place(port: int, node_rank: int = 0, num_nodes: int = 2, num_ranks: int = 2) -> NodePlace:
    return NodePlace(node_rank, num_nodes, num_ranks, ("127.0.0.2", port))


@contextmanager
def running_host(
    where: NodePlace, model: Path, secret: bytes = SECRET, adapters: Path | None = None
) -> Iterator[RankHost]:
    """Run a node other than the leader's."""
    host = RankHost(where, secret, HostDirectories(str(model), None if adapters is None else str(adapters)))
    started: set[int] = set()
    try:
        wait_until(lambda: len(host.pids) == where.num_local, "ranks have not been started")
        yield host
    finally:
        started.update(host.pids.values())
        host.close()
    assert not any(map(is_alive, started)), "a rank outlives its host"


def others(where: NodePlace, on_leaving: Callable[[str], None] = lambda reason: None) -> OtherNodes:
    return OtherNodes(where, SECRET, on_leaving)


@contextmanager
def loaded(model: Path, port: int, on_leaving: Callable[[str], None] = lambda reason: None) -> Iterator[Any]:
    """The engine of two nodes with a rank each."""
    engine: Any = load_ranks(model, 2, nodes=others(place(port), on_leaving))
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture
def nodes(model: Path, port: int) -> Iterator[tuple[Any, RankHost]]:
    """An engine of two nodes, and the node without the leader."""
    with running_host(place(port, 1), model) as host, loaded(model, port) as engine:
        yield engine, host


def test_two_nodes_compute_and_hand_over_what_one_rank_does(nodes: Any, model: Path) -> None:
    engine = nodes[0]
    expect_what_one_rank_gives(engine, load(model, model_id=model.name))
    given = np.random.default_rng(1).integers(256, size=engine.store.block_nbytes, dtype=np.uint8)
    engine.store.open_write(60, 0)[:] = given.data
    engine.store.close_write(60)
    assert bytes(engine.store.open_read(60, 0).wait(None, 1)) == given.tobytes()


@pytest.mark.parametrize(("num_ranks", "num_stages"), [(4, 1), (2, 2), (1, 4)])
def test_nodes_with_several_ranks_each(num_ranks: int, num_stages: int, tmp_path: Path, port: int) -> None:
    """Four ranks: one stage, a stage on each node, or two stages on each. Five layers make the stages unequal."""
    sizes = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 5}
    save_model(tmp_path, transformers.LlamaConfig(**sizes))
    with running_host(place(port, 1, 2, 4), tmp_path):
        engine = load_ranks(tmp_path, num_ranks, num_stages=num_stages, nodes=others(place(port, 0, 2, 4)))
        try:
            assert [rank.rank for rank in engine._ranks.others] == [1, 2, 3]  # type: ignore[attr-defined]
            assert_same_tokens([run(engine)[1]], [run(load(tmp_path))[1]], ROUNDING)
            given = np.random.default_rng(1).integers(256, size=engine.store.block_nbytes, dtype=np.uint8)
            engine.store.open_write(60, 0)[:] = given.data
            engine.store.close_write(60)
            assert bytes(engine.store.open_read(60, 0).wait(None, 1)) == given.tobytes()  # type: ignore[union-attr, arg-type]
        finally:
            engine.close()


def test_a_rank_of_another_node_that_dies_ends_the_engine_and_comes_back(model: Path, port: int) -> None:
    with running_host(place(port, 1), model) as host:
        with loaded(model, port) as engine:
            run(engine)
            (pid,) = host.pids.values()
            os.kill(pid, signal.SIGKILL)
            wait_until(engine.not_live, "nobody has noticed that a rank is dead")
            (reason,) = engine.not_live()
            assert reason.startswith(f"rank 1 (process {pid} of {socket.gethostname()}) is gone"), reason
            with pytest.raises(DeviceFailedError, match="rank 1"):
                run(engine)
        with loaded(model, port) as again:
            assert list(host.pids.values()) != [pid]
            assert_same_tokens([run(again)[1]], [run(load(model))[1]], ROUNDING)


def test_a_rank_of_another_node_that_hangs_ends_the_engine_and_is_killed_there(
    nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, host = nodes
    monkeypatch.setattr("kvrelay.engine.ranks.host._HANGS_S", 6.0)
    expect_signs_within(engine, 3.0, monkeypatch)
    (pid,) = host.pids.values()
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(DeviceFailedError, match=rf"rank 1 \(process {pid} of .*\) has been silent for 3 s: it hangs"):
        run(engine)
    wait_until(lambda: not is_alive(pid), "the rank that hangs was not killed")


def test_a_node_that_is_asked_to_end_waits_for_its_leader_to_finish(model: Path, port: int) -> None:
    left: list[str] = []
    with running_host(place(port, 1), model) as host:
        with loaded(model, port, left.append) as engine:
            (pid,) = host.pids.values()
            host.leave()
            wait_until(lambda: left, "the leader has not heard that the node leaves")
            assert left == [f"the host of rank 1 (process {pid} of {socket.gethostname()}) is asked to end"]
            run(engine)
            assert not host.wait(0)
        assert host.wait(SOON_S)


def test_a_node_without_a_leader_ends_when_it_is_asked(model: Path, port: int) -> None:
    with running_host(place(port, 1), model) as host:
        host.leave()
        assert host.wait(SOON_S)
        assert not host.not_live()


def test_a_rank_whose_model_is_another_one_is_named(model: Path, tmp_path: Path, port: int) -> None:
    save_model(tmp_path, transformers.LlamaConfig(**{**SIZES, "max_position_embeddings": 512}))
    with (
        running_host(place(port, 1), tmp_path),
        pytest.raises(ModelError, match="all nodes need the same model"),
    ):
        load_ranks(model, 2, nodes=others(place(port)))


def test_a_node_whose_model_cannot_be_loaded_is_named(model: Path, tmp_path: Path, port: int) -> None:
    with (
        running_host(place(port, 1), tmp_path),
        pytest.raises(ModelError, match=r"^rank 1 \(.*\) cannot load .*config\.json"),
    ):
        load_ranks(model, 2, nodes=others(place(port)))


LEADER = """
import sys, time
sys.path.append(sys.argv[3])
from tests.engine.ranks.conftest import load_ranks
from tests.engine.ranks.test_several_nodes import others, place
from kvrelay.engine.ranks.nodes import OtherNodes
from pathlib import Path
secret = bytes.fromhex(sys.argv[4])
nodes = OtherNodes(place(int(sys.argv[2])), secret, lambda reason: None)
engine = load_ranks(Path(sys.argv[1]), 2, nodes=nodes)
print("up", flush=True)
time.sleep(120)
"""

HOST = """
import sys, time
sys.path.append(sys.argv[3])
from tests.engine.ranks.test_several_nodes import place
from kvrelay.engine.ranks.host import RankHost
from kvrelay.engine.ranks.nodes import HostDirectories
host = RankHost(place(int(sys.argv[2]), 1), bytes.fromhex(sys.argv[4]), HostDirectories(sys.argv[1]))
while not host.pids:
    time.sleep(0.01)
print(*host.pids.values(), flush=True)
time.sleep(120)
"""


@contextmanager
def script(text: str, model: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", text, str(model), str(port), str(ROOT), SECRET.hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_leader_that_dies_or_hangs_is_left_for_the_next_one(
    model: Path, port: int, number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """A leader that hangs sends no heartbeat for fifteen seconds, although its kernel still acknowledges data."""
    with running_host(place(port, 1), model) as host:
        with script(LEADER, model, port) as leader:
            assert said(leader) == "up"
            (pid,) = host.pids.values()
            os.kill(leader.pid, number)
            wait_until(lambda: not is_alive(pid), "the rank has not ended")
        with loaded(model, port) as engine:
            run(engine)
    if number is signal.SIGSTOP:
        assert "rank 1: ending: the leader has been silent for 15 s: it hangs" in caplog.text


def test_a_hosts_process_that_is_killed_leaves_no_rank_and_ends_the_engine(model: Path, port: int) -> None:
    with script(HOST, model, port) as host:
        pid = int(said(host))
        with loaded(model, port) as engine:
            host.kill()
            wait_until(lambda: not is_alive(pid), "the rank has not ended")
            wait_until(engine.not_live, "the leader has not noticed")
            assert f"rank 1 (process {pid} of" in engine.not_live()[0]


# -- admission of ranks --------------------------------------------------------------------------------------------


@pytest.fixture
def door(port: int) -> Iterator[Door]:
    made = Door(others(place(port, 0, 3, 3)))
    yield made
    made.close()


def call(door: Door, rank: int = 1, secret: bytes = SECRET, **changes: Any) -> tuple[Link[Any], Hello]:
    """Connect as a rank and send its Hello, with ``changes``."""
    hello = Hello(rank, 3, 3, kvrelay.__version__, secrets.token_hex(16), "process 7 of a host", carries_blocks=False)
    hello = msgspec.structs.replace(hello, **changes)
    stream = socket.create_connection(door._nodes.place.leader)
    link = sealed_link(stream, FromLeader, secret, calls=True)
    link.send(hello)
    return link, hello


def come_in(door: Door, rank: int) -> list[Link[Any]]:
    """Connect both links of a rank, which may arrive in any order."""
    first, hello = call(door, rank)
    links = [first, call(door, rank, life=hello.life, carries_blocks=True)[0]]
    wait_until(
        lambda: rank in door._arrived and door._arrived[rank].hello.life == hello.life, f"rank {rank} is not here"
    )
    return links


def close(*links: Link[Any]) -> None:
    for link in links:
        link.shut()
        link.close()


def test_all_ranks_are_waited_for_and_those_that_are_missing_named(door: Door) -> None:
    second = come_in(door, 2)
    with pytest.raises(ModelError, match=r"these ranks have not come to 127\.0\.0\.2:\d+: 1 \(node 1\)\. Does"):
        door.wait(0.5)
    first = come_in(door, 1)
    arrived = door.wait(SOON_S)
    assert [one.hello.rank for one in arrived] == [1, 2]
    close(*first, *second)
    for one in arrived:
        one.close()


def test_a_rank_that_came_and_went_is_waited_for_again(door: Door) -> None:
    gone = come_in(door, 1)
    close(*gone)
    wait_until(lambda: door._arrived[1].is_over, "its connections are not over")
    second = come_in(door, 2)
    with pytest.raises(ModelError, match=r"1 \(node 1\)\."):
        door.wait(0.3)
    first = come_in(door, 1)
    arrived = door.wait(SOON_S)
    close(*first, *second)
    for one in arrived:
        one.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": "0.0.1"}, "it is kvrelay 0.0.1, of 3 ranks on 3 nodes, its leader"),
        ({"num_ranks": 6}, "of 6 ranks on 3 nodes"),
        ({"rank": 0}, "it is not one of ranks 1 to 2: is its --node-rank right"),
        ({"rank": 3}, "it is not one of ranks 1 to 2"),
        ({"rank": 2}, "rank 2 is here already: process 7 of a host"),
    ],
)
def test_who_does_not_belong_here_is_told_why(door: Door, changes: dict[str, Any], reason: str) -> None:
    here = come_in(door, 2)
    link, hello = call(door, **changes)
    blocks, _ = call(door, **changes, life=hello.life, carries_blocks=True)
    told = link.receive(SOON_S)
    assert isinstance(told, Refused)
    assert reason in told.reason
    close(link, blocks, *here)


def test_strangers_are_dropped_and_named_and_keep_nobody_out(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    silent = [socket.create_connection(door._nodes.place.leader) for _ in range(8)]
    with socket.create_connection(door._nodes.place.leader) as talker:
        talker.sendall(b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n" * 4)
        with contextlib.suppress(ConnectionResetError):
            while talker.recv(4096):
                pass
    other, _ = call(door, secret=b"another")
    with pytest.raises(EOFError):
        other.receive(SOON_S)
    ranks = come_in(door, 1) + come_in(door, 2)
    arrived = door.wait(SOON_S)
    for line in (
        "a connection from 127.0.0.1 is no rank of this worker: the other end is no rank of this version",
        "the other end has another secret: both need the same --keys, or none",
    ):  # logged by other threads, behind the end of the connection
        wait_until(lambda line=line: line in caplog.text, f"no line {line!r}")  # type: ignore[misc]
    for stream in silent:
        assert stream.recv(4096)[:7] == b"kvrelay"
        stream.close()
    close(other, *ranks)
    for one in arrived:
        one.close()


def test_either_link_of_a_rank_may_come_first(door: Door) -> None:
    blocks, hello = call(door, 1, carries_blocks=True)
    wait_until(lambda: 1 in door._halves, "its first link is not here")
    plans, _ = call(door, 1, life=hello.life)
    other = come_in(door, 2)
    arrived = door.wait(SOON_S)
    arrived[0].link.send(Refused("plans"))
    told = plans.receive(SOON_S)
    assert isinstance(told, Refused)
    close(plans, blocks, *other)
    for one in arrived:
        one.close()


def test_a_leader_that_cannot_listen_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.engine.ranks.door._BIND_S", 0.0)
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"--leader-address: node 0 cannot listen on 127\.0\.0\.2:{port} "):
            Door(others(place(port)))
