"""The places of ranks on nodes, and refused settings."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.common.errors import SettingsError
from kvrelay.engine.ranks.nodes import place_of
from kvrelay.engine.settings import NodeSettings

LEADER = "tcp://10.0.0.1:7202"


def test_a_worker_of_one_node_has_no_place() -> None:
    assert place_of(NodeSettings(), 4) is None


def test_every_node_has_as_many_ranks_which_are_told_by_torchruns_variables() -> None:
    place = place_of(NodeSettings(nodes=2, node_rank=1, leader_address=LEADER), 6)
    assert place is not None
    assert place.ranks == range(3, 6)
    assert place.environment(4) == {
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "7202",
        "RANK": "4",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
    }


@pytest.mark.parametrize(
    ("name", "node_rank", "leader"),
    [("r-decode-worker-0", 0, "r-decode-worker-0"), ("r-decode-worker-5", 2, "r-decode-worker-3"), ("w-10", 1, "w-9")],
)
def test_a_pods_name_says_which_node_it_is_and_who_leads(name: str, node_rank: int, leader: str) -> None:
    place = place_of(NodeSettings(nodes=3, node_name=name, leader_address="tcp://{leader}.ranks:7202"), 3)
    assert place is not None
    assert (place.node_rank, place.leader) == (node_rank, (f"{leader}.ranks", 7202))


def test_an_address_of_ipv6_has_brackets() -> None:
    place = place_of(NodeSettings(nodes=2, leader_address="tcp://[fd00::1]:7202"), 2)
    assert place is not None
    assert place.leader == ("fd00::1", 7202)


@pytest.mark.parametrize(
    ("settings", "num_ranks", "reason"),
    [
        ({"nodes": 4, "leader_address": LEADER}, 6, "which 4 nodes do not divide: take 1, 2, 3, 6 nodes"),
        ({"nodes": 2}, 2, "--leader-address must say where node 0 hears"),
        ({"nodes": 2, "node_rank": 2, "leader_address": LEADER}, 2, "--node-rank is 2; of 2 nodes the last is 1"),
        ({"nodes": 2, "node_name": "worker", "leader_address": LEADER}, 2, "it must end in a number"),
        ({"nodes": 2, "leader_address": "10.0.0.1:7202"}, 2, "'10.0.0.1:7202'; it must be tcp://HOST:PORT"),
        ({"nodes": 2, "leader_address": "tcp://a:70000"}, 2, "it must be tcp://HOST:PORT"),
        ({"nodes": 2, "leader_address": "tcp://{leader}.a:7202"}, 2, "it must be tcp://HOST:PORT"),
        ({"node_rank": 1}, 2, "--node-rank is 1, and --nodes is 1"),
        ({"leader_address": LEADER}, 2, "and --nodes is 1"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(settings: dict[str, Any], num_ranks: int, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason.replace("(", r"\(")):
        place_of(NodeSettings(**settings), num_ranks)
