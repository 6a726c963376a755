"""The assignment of GPUs to the workers of a local deployment."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvrelay.decode_worker.settings import DecodeSettings
from kvrelay.launcher.local.gpus import WorkerRanks, assigned, visible_gpus, who_has_which
from kvrelay.launcher.local.plan import Plan, num_ports, plan_deployment
from kvrelay.launcher.settings import LocalSettings
from kvrelay.prefill_worker.settings import PrefillSettings

from .test_plan import parsed


def workers(*num_ranks: int) -> list[WorkerRanks]:
    return [WorkerRanks(f"w{index}", "decode", count) for index, count in enumerate(num_ranks)]


def gpus(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def planned(num_gpus: int, **options: Any) -> Plan:
    settings = LocalSettings.of(model="/models/tiny", **options)
    ports = list(range(20_000, 20_000 + num_ports(settings)))
    return plan_deployment(
        settings, Path("/models/tiny"), http_port=8000, ports=ports, num_cores=8, gpus=gpus(num_gpus)
    )


def having(plan: Plan) -> dict[str, str | None]:
    return {spec.name: spec.environment.get("CUDA_VISIBLE_DEVICES") for spec in plan.specs}


@pytest.mark.parametrize("num_gpus", range(1, 9))
@pytest.mark.parametrize("ranks", [(1, 1), (1, 3), (2, 1, 1), (2, 2, 4), (1, 1, 1, 1, 1), (3, 3)])
def test_each_has_its_own_as_far_as_they_go(num_gpus: int, ranks: tuple[int, ...]) -> None:
    chosen = assigned(gpus(num_gpus), workers(*ranks))
    load = dict.fromkeys(gpus(num_gpus), 0)
    for (_, its), count in zip(chosen.items(), ranks, strict=True):
        assert len(set(its)) == len(its) == min(count, num_gpus), "no two ranks of a worker are on one GPU"
        for gpu in its:
            load[gpu] += 1
    if sum(ranks) <= num_gpus:
        assert max(load.values()) == 1, "workers share a GPU while others are free"
    elif max(ranks) <= num_gpus:
        assert min(load.values()) >= 1, "workers share, and a GPU is free"
        assert max(load.values()) - min(load.values()) <= 1


def test_a_workers_gpus_are_in_the_machines_order() -> None:
    for its in assigned(gpus(5), workers(2, 3, 4)).values():
        assert all(int(one) < int(other) for one, other in pairwise(its))


def test_who_has_which_is_said() -> None:
    plan = planned(2, prefill_tensor_parallel=1, decode_tensor_parallel=2)
    assert having(plan) == {"prefill-0": "0", "decode-0": "0,1", "gateway": None}
    assert plan.gpus == "GPUs: prefill-0 has 0 (shared with decode-0); decode-0 has 0, 1 (shared with prefill-0)"
    own = planned(4, prefill_tensor_parallel=1, decode_pipeline_parallel=3)
    assert having(own) == {"prefill-0": "0", "decode-0": "1,2,3", "gateway": None}
    assert own.gpus == "GPUs: prefill-0 has 0; decode-0 has 1, 2, 3"
    assert who_has_which({"a": ("MIG-1",)}) == "GPUs: a has MIG-1"


@pytest.mark.parametrize(
    ("num_gpus", "fractions"),
    [
        (0, [0.4, 0.5]),
        (1, [0.4, 0.5]),
        (2, [0.9, 0.9]),
    ],
)
def test_a_worker_that_has_a_gpu_alone_may_have_all_of_it(num_gpus: int, fractions: list[float]) -> None:
    plan = planned(num_gpus)
    prefill, decode = parsed(PrefillSettings, plan.specs[0]), parsed(DecodeSettings, plan.specs[1])
    assert [prefill.kv.kv_memory_fraction, decode.kv.kv_memory_fraction] == fractions
    if num_gpus < 2:
        assert not plan.gpus
        assert set(having(plan).values()) == {None}


def test_the_fullest_of_a_workers_gpus_decides_its_memory() -> None:
    """Two prefill workers and a decode worker of two ranks share two GPUs. Each GPU has one prefill worker and one
    decode rank."""
    plan = planned(2, prefill=2, decode_tensor_parallel=2)
    assert having(plan) == {"prefill-0": "0", "prefill-1": "1", "decode-0": "0,1", "gateway": None}
    decode = parsed(DecodeSettings, plan.specs[2])
    assert decode.kv.kv_memory_fraction == 0.5


def test_the_gpus_that_the_launcher_sees(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ("0", "1")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, GPU-5f"}, tmp_path) == ("2", "GPU-5f")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()
    assert visible_gpus({}, tmp_path / "none") == ()
