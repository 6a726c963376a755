"""Workers of several ranks with workers of one rank: answers equal those of one rank, and a killed rank costs only a
pause."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvrelay.launcher.local.deployment import LocalDeployment
from kvrelay.launcher.local.ports import free_ports
from kvrelay.launcher.settings import LocalSettings
from tests.adapters import linear_shapes, merge, write_adapter
from tests.reliability.figures import wait_until

from .conftest import PATIENCE_S, serving, wait_until_idle
from .promises import FEW, LONG, Answer, Wish, ask_alone, ask_together
from .test_demo import http
from .test_same_seed import Stream, Told

pytestmark = pytest.mark.timeout(300)

ADAPTER = "formal"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Path:
    """A directory with one adapter, which changes all layers."""
    directory: Path = tmp_path_factory.mktemp("adapters")
    write_adapter(directory / ADAPTER, linear_shapes(model_directory), size=0.15)
    return directory


@pytest.fixture(scope="module")
def of_merged(adapters: Path, model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """The answers of one rank that serves a model with the adapter merged into it."""
    directory = tmp_path_factory.mktemp("merged") / "model"
    merge(model_directory, adapters / ADAPTER, directory)
    with serving(directory, num_blocks=64, prefill=0, local_prefill="sooner") as running:
        return asyncio.run(ask_alone(running.url, FEW))


@pytest.fixture(scope="module", params=[(3, 1), (1, 3)], ids=["3-to-1", "1-to-3"])
def unequal(request: pytest.FixtureRequest, model_directory: Path, adapters: Path) -> Iterator[LocalDeployment]:
    """A prefill and a decode worker, one of them with three ranks. The model has nine query heads."""
    prefill, decode = request.param
    sizes = {"prefill_tensor_parallel": prefill, "decode_tensor_parallel": decode}
    with serving(model_directory, num_blocks=64, adapters=str(adapters), **sizes) as running:
        yield running


async def test_unequal_pools_answer_as_one_rank_does(of_one_rank: dict[str, Answer], unequal: LocalDeployment) -> None:
    for name, answer in (await ask_together(unequal.url, FEW)).items():
        assert told(answer) == told(of_one_rank[name]), name
    await asyncio.to_thread(wait_until_idle, unequal)


async def test_unequal_pools_compute_with_an_adapter(
    of_one_rank: dict[str, Answer], of_merged: dict[str, Answer], unequal: LocalDeployment
) -> None:
    named = {name: Wish(wish.prompt, {**wish.fields, "model": ADAPTER}) for name, wish in FEW.items()}
    both = await ask_together(unequal.url, {**named, **{f"base, {name}": wish for name, wish in FEW.items()}})
    for name in FEW:
        assert both[name].outputs == of_merged[name].outputs, name
        assert both[f"base, {name}"].outputs == of_one_rank[name].outputs, name
    assert any(of_merged[name].outputs != of_one_rank[name].outputs for name in FEW)
    await asyncio.to_thread(wait_until_idle, unequal)


async def test_a_rank_that_is_killed_costs_a_pause(of_one_rank: dict[str, Answer], unequal: LocalDeployment) -> None:
    [(worker, rank)] = ranks(unequal)[:1]
    await is_killed_amid_an_answer(unequal, rank, told(of_one_rank["long"]))
    reason = f"(process {rank}) was ended by SIGKILL"

    def is_told() -> bool:
        return any(reason in line for line in unequal.log.lines if worker in line)

    await asyncio.to_thread(wait_until, is_told, PATIENCE_S, f"{worker} says: {reason}")
    await says_so_when_it_is_ready(unequal, told(of_one_rank["long"]))
    assert not psutil.pid_exists(rank)


async def is_killed_amid_an_answer(deployment: LocalDeployment, process: int, expected: Told) -> None:
    """Kill the process during a stream, whose answer must still be complete and right."""
    async with http(deployment) as client, asyncio.TaskGroup() as running:
        stream = Stream("long", LONG)
        running.create_task(stream.run(client))
        await stream.is_under_way.wait()
        os.kill(process, signal.SIGKILL)
    assert stream.told == expected


async def says_so_when_it_is_ready(deployment: LocalDeployment, expected: Told) -> None:
    """Wait until all components are ready, and check that the answer is the same."""
    await asyncio.to_thread(deployment.wait_ready, timeout_s=120)
    again = await ask_alone(deployment.url, {"long": LONG})
    assert told(again["long"]) == expected


def told(answer: Answer) -> Told:
    """The text and token ids of each choice."""
    return [(one["text"], one["token_ids"]) for one in answer.choices]


def ranks(deployment: LocalDeployment) -> list[tuple[str, int]]:
    """The worker's name and the process id of each rank that is not a leader."""
    return [
        (name, child.pid)
        for name, pid in deployment.pids.items()
        for child in psutil.Process(pid).children(recursive=True)
        if "kvrelay.engine.rank_main" in child.cmdline()
    ]


@pytest.fixture(scope="module")
def spread(model_directory: Path) -> Iterator[LocalDeployment]:
    """A decode worker of three nodes with one rank each. The nodes are processes, which find their leader by a loopback
    address."""
    settings = LocalSettings.of(
        port=0, device="cpu", dtype="float32", threads=1, num_blocks=64, local_prefill="fallback",
        room_timeout_s=PATIENCE_S, decode_tensor_parallel=3,
    )  # fmt: skip
    plan = LocalDeployment.from_settings(settings, model_directory).plan
    (leader,) = [spec for spec in plan.specs if spec.name == "decode-0"]
    port, *admin_ports = free_ports(3)
    nodes = ("--nodes=3", f"--leader-address=tcp://127.0.0.2:{port}")
    specs = [
        dataclasses.replace(spec, command=(*spec.command, *nodes)) if spec == leader else spec for spec in plan.specs
    ]
    for node_rank, admin_port in enumerate(admin_ports, start=1):
        more = (*nodes, f"--node-rank={node_rank}", f"--admin-port={admin_port}")
        specs.append(
            dataclasses.replace(
                leader,
                name=f"decode-0-node-{node_rank}",
                command=(*leader.command, *more),
                ready_url=f"http://127.0.0.1:{admin_port}/health/ready",
            )
        )
    with LocalDeployment(dataclasses.replace(plan, specs=tuple(specs))) as running:
        running.wait_ready(timeout_s=180)
        yield running


async def test_a_decode_worker_of_several_nodes_answers_as_one_rank_does(
    of_one_rank: dict[str, Answer], spread: LocalDeployment
) -> None:
    """The decode worker's three ranks are on three nodes."""
    await test_unequal_pools_answer_as_one_rank_does(of_one_rank, spread)


async def test_a_rank_of_another_node_that_is_killed_costs_a_pause(
    of_one_rank: dict[str, Answer], spread: LocalDeployment
) -> None:
    killed = dict(ranks(spread))["decode-0-node-2"]
    await is_killed_amid_an_answer(spread, killed, told(of_one_rank["long"]))

    def is_told() -> bool:
        return any(f"rank 2 (process {killed} of" in line for line in spread.log.lines if "decode-0 |" in line)

    await asyncio.to_thread(wait_until, is_told, PATIENCE_S, f"the worker names rank 2, process {killed}")
    await says_so_when_it_is_ready(spread, told(of_one_rank["long"]))
