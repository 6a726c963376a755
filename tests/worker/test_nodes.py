"""A worker on several nodes: settings that are refused, the ranks' secret and addresses, and how it leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import build
from kvrelay.decode_worker.settings import DecodeSettings
from kvrelay.engine.ranks.nodes import NodePlace
from kvrelay.wire.messages import Role
from kvrelay.wire.security.keys import WireKeys, make_keys
from kvrelay.worker.main import serve_worker
from kvrelay.worker.nodes import Leaving, node_addresses, ranks_secret


def settings(**values: Any) -> DecodeSettings:
    given = {"tensor_parallel": 2, "nodes": 2, "leader_address": "tcp://10.1.2.3:7202", "model": "/nowhere"}
    return build(DecodeSettings, {**given, **values})


def never(*_: Any) -> Any:
    raise AssertionError("nothing is loaded")


@pytest.fixture(autouse=True)
def _own_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test process keeps its log handlers and their level."""
    monkeypatch.setattr("kvrelay.worker.main.configure_logs", lambda *_: None)


@pytest.mark.parametrize("node_rank", [0, 1])
def test_ranks_of_other_hosts_need_keys_or_a_word_of_the_operators(node_rank: int) -> None:
    """Without keys both nodes refuse a leader address that other machines can reach."""
    with pytest.raises(
        SettingsError, match=r"tcp://10\.1\.2\.3:7202 can be reached from other machines, and without --keys"
    ):
        serve_worker(Role.DECODE, settings(node_rank=node_rank), {"--address": "tcp://127.0.0.1:7200"}, never)


def test_nodes_that_do_not_divide_the_ranks_are_refused_before_anything_starts() -> None:
    with pytest.raises(SettingsError, match="take 1, 3 nodes"):
        serve_worker(Role.DECODE, settings(tensor_parallel=3), {}, never)


def test_nodes_of_one_role_have_the_same_secret(tmp_path: Path) -> None:
    make_keys(tmp_path)
    decode, prefill = WireKeys.load(tmp_path, Role.DECODE), WireKeys.load(tmp_path, Role.PREFILL)
    assert ranks_secret(None) == b""
    assert ranks_secret(decode) == ranks_secret(WireKeys.load(tmp_path, Role.DECODE)) != ranks_secret(prefill)


def test_an_address_of_ipv6_is_written_with_brackets() -> None:
    assert node_addresses(None) == ()
    assert node_addresses(NodePlace(0, 2, 2, ("::1", 7202))) == ("tcp://[::1]:7202",)


def test_the_first_node_that_leaves_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    leaving = Leaving()
    assert not leaving.is_set()
    leaving.because("node 1 is asked to end")
    leaving.because("node 2 is asked to end")
    assert leaving.is_set()
    assert "node 1 is asked to end, and so this worker" in caplog.text
    assert "node 2" not in caplog.text
