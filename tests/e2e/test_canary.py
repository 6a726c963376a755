"""A bit of a weight flips in a running prefill worker's memory, during a stream whose prompt that worker computed.

Its canary detects it: the worker's cached blocks are dropped, and its process ends with an exit code of its own. The
client gets the right answer. Where Prometheus is installed, the alert fires.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors

from kvrelay.launcher.client import counter_values
from kvrelay.launcher.local.deployment import LocalDeployment
from kvrelay.worker.worker import WRONG_EXIT_CODE
from tests.bit_flips import flip_bit
from tests.reliability.figures import wait_until

from ..helm.alerts import groups
from .conftest import PATIENCE_S, serving
from .prometheus import prometheus_of
from .promises import Wish, ask_alone
from .test_demo import http
from .test_same_seed import Stream

pytestmark = pytest.mark.timeout(300)

STORY = Wish("Tell me a story of two brothers.", {"temperature": 0.0, "max_tokens": 120, "ignore_eos": True})
OTHERS = {str(number): Wish(f"{number}, {number}, {number}, and again. " * 4, {"max_tokens": 2}) for number in range(4)}
PREFILLS = ("prefill-0", "prefill-1")
WEIGHT = "model.layers.10.post_attention_layernorm.weight"
EXPONENT_BIT = 30  # the top exponent bit of the first number
_DROPPED = re.compile(r"decode-0 \| .*prefill worker .* computed wrongly: (\d+) cached KV blocks dropped")


@pytest.fixture
def checked(model_directory: Path) -> Iterator[LocalDeployment]:
    """A gateway, two prefill workers and one decode worker, with canaries."""
    with serving(model_directory, prefill=2, num_blocks=64, canary_period_s=0.2) as running:
        yield running


async def test_a_bit_that_flips_in_a_running_worker_costs_its_clients_nothing(
    checked: LocalDeployment, model_directory: Path, tmp_path: Path
) -> None:
    answers = await ask_alone(checked.url, {"story": STORY, **OTHERS})
    [expected] = [(one["text"], one["token_ids"]) for one in answers["story"].choices]
    await asyncio.to_thread(wait_until, lambda: has_checked(checked), PATIENCE_S, "two canaries of each prefill worker")
    async with (
        fires("KvrelayComputesWrongly", checked, tmp_path),
        http(checked) as client,
        asyncio.TaskGroup() as running,
    ):
        stream = Stream("story", STORY)
        running.create_task(stream.run(client))
        await stream.is_under_way.wait()
        worker = worker_at(checked, (await attempts(client, stream))[0])
        assert flip_bit(checked.pids[worker], weight(model_directory), EXPONENT_BIT) > 0
        told = f"{worker}: died exit code {WRONG_EXIT_CODE}"
        await asyncio.to_thread(wait_until, lambda: says(checked, told), PATIENCE_S, told)
        # The gateway and the decode worker hear of it on their own, perhaps later than the launcher.
        await asyncio.to_thread(wait_until, lambda: drops(checked) != [], PATIENCE_S, "decode-0 drops blocks")
        [num_dropped] = drops(checked)
        assert num_dropped > 0, "what it shipped for others before is cached no more"
        async with asyncio.timeout(PATIENCE_S):
            while len(moved := await attempts(client, stream)) < 2:
                await asyncio.sleep(0.01)  # polls for a state, bounded by the timeout above
    assert stream.told == [expected]
    assert len(moved) == 2, moved
    assert worker_at(checked, moved[1]) != worker
    await asyncio.to_thread(checked.wait_ready, timeout_s=120)
    await asyncio.to_thread(wait_until, lambda: not holders(checked), PATIENCE_S, "only canaries hold blocks")


@asynccontextmanager
async def fires(alert: str, deployment: LocalDeployment, directory: Path) -> AsyncIterator[None]:
    """Check that an alert of the chart is silent at the start of the block, and fires during the block or soon after
    it."""
    if shutil.which("prometheus") is None or shutil.which("helm") is None:
        yield
        return
    async with prometheus_of({"gateway-0": deployment.admin_urls["gateway"]}, directory, groups()) as prometheus:
        await prometheus.until_data({"the gateway": "kvrelay_distrusted_workers_total"})
        async with asyncio.TaskGroup() as watching:
            watching.create_task(prometheus.until_fired({alert}))
            yield


async def attempts(client: httpx.AsyncClient, stream: Stream) -> list[str]:
    """The address of the prefill worker of each attempt at the request."""
    [known] = (await client.get(f"/debug/requests/{stream.request_id}")).json()["requests"]
    return [attempt["workers"][0] for attempt in known["sequences"][0]["attempts"]]


def worker_at(deployment: LocalDeployment, address: str) -> str:
    """The component that listens at ``address``."""
    [name] = [
        spec.name for spec in deployment.plan.specs if spec.name != "gateway" and f"--address={address}" in spec.command
    ]
    return name


def has_checked(deployment: LocalDeployment) -> bool:
    """Whether each prefill worker has more than one canary with the result "same"."""
    name, labels = "kvrelay_canaries_total", {"result": "same"}
    return all(sum(counter_values(deployment.admin_urls[worker], name, labels)) > 1 for worker in PREFILLS)


def holders(deployment: LocalDeployment) -> set[str]:
    """The owners of blocks on any worker, without canaries."""
    owners = {owner for name in (*PREFILLS, "decode-0") for owner in ledger_of(deployment, name)["owners"]}
    return {owner for owner in owners if "canary of this worker" not in owner}


def ledger_of(deployment: LocalDeployment, name: str) -> dict[str, Any]:
    """A worker's block ledger, from /debug/kv."""
    found: dict[str, Any] = httpx.get(f"{deployment.admin_urls[name]}/debug/kv", timeout=30).json()["ledger"]
    return found


def drops(deployment: LocalDeployment) -> list[int]:
    """The number of blocks of each time at which the decode worker says that it dropped some."""
    return [int(found[1]) for line in deployment.log.lines if (found := _DROPPED.fullmatch(line))]


def says(deployment: LocalDeployment, what: str) -> bool:
    return any(what in line for line in deployment.log.lines)


def weight(model_directory: Path) -> bytes:
    """The weight's bytes in a float32 worker's memory."""
    for file in sorted(model_directory.glob("*.safetensors")):
        with safetensors.safe_open(file, "pt") as tensors:
            if WEIGHT in tensors.keys():  # noqa: SIM118 - not a dictionary
                return bytes(tensors.get_tensor(WEIGHT).float().numpy().tobytes())
    raise AssertionError(f"no {WEIGHT} in {model_directory}")
