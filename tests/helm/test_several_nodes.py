"""Workers of several nodes: StatefulSets, LeaderWorkerSets, and the notes on how to scale them."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import yaml

from kvrelay.engine.ranks.nodes import place_of
from kvrelay.engine.settings import NodeSettings

from .chart import CHART, GROUPS, NODES, env_of, helm, needs_helm, objects, refusal


@needs_helm
def test_a_worker_of_several_nodes_is_as_many_pods_of_one_set() -> None:
    """Each pod derives its leader's address from its own name. The Service publishes addresses of pods that are not
    ready."""
    found = objects("--set", NODES)
    name = "relay-kvrelay-decode-worker"
    assert ("Deployment", name) not in found
    assert ("StatefulSet", "relay-kvrelay-prefill-worker") not in found
    spec = found["StatefulSet", name]["spec"]
    assert (spec["replicas"], spec["serviceName"], spec["podManagementPolicy"]) == (6, name, "Parallel")
    assert spec["template"]["metadata"]["labels"]["kvrelay.dev/nodes-per-worker"] == "2"
    assert "kvrelay.dev/nodes-per-worker" not in spec["selector"]["matchLabels"]
    pod = spec["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 2}
    environment = env_of(pod)
    assert environment["KVRELAY_TENSOR_PARALLEL"] == "4"
    assert environment["KVRELAY_NODES"] == "2"
    settings = NodeSettings(nodes=2, node_name=f"{name}-3", leader_address=environment["KVRELAY_LEADER_ADDRESS"])
    place = place_of(settings, 4)
    assert place is not None
    assert (place.node_rank, place.leader) == (1, (f"{name}-2.{name}", 7202))
    service = found["Service", name]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert "publishNotReadyAddresses" not in found["Service", "relay-kvrelay-prefill-worker"]["spec"]


@needs_helm
def test_a_worker_of_several_nodes_may_be_a_group_of_a_leader_worker_set() -> None:
    """The LeaderWorkerSet tells each pod its rank and its leader's address. All else equals the StatefulSet's pods."""
    found, of_set = (copy.deepcopy(objects("--set", values)) for values in (GROUPS, NODES))
    name = "relay-kvrelay-decode-worker"
    assert ("StatefulSet", name) not in found
    group_set = found["LeaderWorkerSet", name]
    assert group_set["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    spec = group_set["spec"]
    assert set(spec) == {"replicas", "leaderWorkerTemplate"}
    group = spec["leaderWorkerTemplate"]
    assert (spec["replicas"], group["size"], group["restartPolicy"]) == (3, 2, "RecreateGroupOnPodRestart")
    template, other = group["workerTemplate"], of_set["StatefulSet", name]["spec"]["template"]
    environment = env_of(template["spec"])
    assert environment["KVRELAY_NODES"] == "2"
    leader = environment["KVRELAY_LEADER_ADDRESS"].replace("$(LWS_LEADER_ADDRESS)", f"{name}-2.{name}.here")
    node_rank = int(environment["KVRELAY_NODE_RANK"].replace("$(LWS_WORKER_INDEX)", "1"))
    place = place_of(NodeSettings(nodes=2, node_rank=node_rank, leader_address=leader), 4)
    assert place is not None
    assert (place.node_rank, place.leader) == (1, (f"{name}-2.{name}.here", 7202))
    for one in (template, other):
        container = one["spec"]["containers"][0]
        container["env"] = [
            variable
            for variable in container["env"]
            if variable["name"] not in ("KVRELAY_NODE_NAME", "KVRELAY_NODE_RANK", "KVRELAY_LEADER_ADDRESS")
        ]
    assert template == other
    assert found["Service", name] == of_set["Service", name]


@needs_helm
@pytest.mark.parametrize(
    ("values", "says"),
    [
        ("decode.tensorParallel=4,decode.nodesPerWorker=3", "which 3 pods do not divide; take 1, 2, 4 pods"),
        (
            "prefill.nodesPerWorker=2",
            "tensorParallel times pipelineParallel is 1, which 2 pods do not divide; take 1 pods",
        ),
        (f"{NODES},decode.autoscaling.hpa.enabled=true", "an autoscaler counts pods, and a worker is 2 of them"),
        (f"{NODES},decode.autoscaling.keda.enabled=true", "an autoscaler counts pods, and a worker is 2 of them"),
        (f"{NODES},fullnameOverride={'long-' * 7}name", "is too long a name for a StatefulSet"),
        (f"{GROUPS},fullnameOverride={'long-' * 6}names", "is too long a name for a LeaderWorkerSet"),
        ("decode.leaderWorkerSet=true", "is for workers of several pods; set decode.nodesPerWorker"),
    ],
)
def test_nodes_that_cannot_be_are_refused_with_a_way_out(values: str, says: str) -> None:
    assert says in refusal(values)


@needs_helm
@pytest.mark.parametrize(
    ("values", "kind", "waits_for_sets"),
    [
        ("prefill.replicas=1", "deployment/relay-kvrelay-prefill-worker --replicas 2", False),
        (
            "prefill.tensorParallel=2,prefill.nodesPerWorker=2",
            "statefulset/relay-kvrelay-prefill-worker --replicas 4",
            True,
        ),
        (NODES, "deployment/relay-kvrelay-prefill-worker --replicas 2", True),
        (
            "models.a.model.name=x,models.b.model.name=y,models.a.prefill.tensorParallel=2,models.a.prefill.nodesPerWorker=2",
            "statefulset/relay-kvrelay-a-prefill-worker --replicas 4",
            True,
        ),
        (
            "prefill.tensorParallel=2,prefill.nodesPerWorker=2,prefill.leaderWorkerSet=true",
            "leaderworkerset/relay-kvrelay-prefill-worker --replicas 2",
            False,
        ),
    ],
)
def test_notes_name_what_there_is(values: str, kind: str, waits_for_sets: bool, tmp_path: Path) -> None:
    # Helm prints notes only with a cluster. Here they are rendered as one of the chart's templates.
    chart = shutil.copytree(CHART, tmp_path / "chart")
    notes = (chart / "templates" / "NOTES.txt").read_text()
    (chart / "templates" / "notes.yaml").write_text(
        f'{{{{ define "notes" }}}}{notes}{{{{ end }}}}\nnotes: {{{{ include "notes" . | toJson }}}}\n'
    )
    ended = helm("template", "relay", str(chart), "--show-only", "templates/notes.yaml", "--set", values)
    assert ended.returncode == 0, ended.stderr
    told = next(filter(None, yaml.safe_load_all(ended.stdout)))["notes"]
    assert f" scale {kind}\n" in told
    assert ("rollout status statefulset -l" in told) is waits_for_sets
    assert (" leaderworkerset -l " in told) is ("leaderWorkerSet=true" in values)
