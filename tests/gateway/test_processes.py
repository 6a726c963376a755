"""A gateway of several processes, in front of a decode worker with a fake engine: real processes, real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.engine.fake import expected_output
from kvrelay.gateway.api_keys import hash_key
from kvrelay.launcher.models import resolve_model
from kvrelay.launcher.ports import free_ports

from .certificates import write_pair

pytestmark = pytest.mark.timeout(120)

PROMPT = list(range(100, 120))
VOCAB_SIZE = 49_152  # the demo model's
STEP_S = 0.02


@dataclass(frozen=True)
class Group:
    """The processes of a gateway."""

    parent: psutil.Process
    url: str
    log: Path

    def children(self) -> list[psutil.Process]:
        return self.parent.children()

    def owners(self, streams: Sequence[Stream]) -> list[int]:
        """The process (by its id) that serves each connection."""
        by_port = {
            one.raddr.port: child.pid
            for child in self.children()
            for one in child.net_connections("tcp")
            if one.raddr and one.status == psutil.CONN_ESTABLISHED
        }
        return [by_port[stream.local_port] for stream in streams]


class Stream:
    """One streamed completion on a connection of its own."""

    def __init__(self, response: httpx.Response) -> None:
        network = response.extensions["network_stream"]
        self.local_port: int = network.get_extra_info("client_addr")[1]
        self._response = response

    async def ids(self) -> list[int] | None:
        """The tokens; None if the stream broke."""
        ids: list[int] = []
        is_whole = False
        try:
            async for line in self._response.aiter_lines():
                is_whole |= line == "data: [DONE]"
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    ids += event["choices"][0]["token_ids"]
        except httpx.TransportError:
            return None
        return ids if is_whole else None


@pytest.fixture(scope="module")
def demo_directory() -> Path:
    return resolve_model("demo")


@pytest.fixture(scope="module")
def worker_address(demo_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A decode worker that computes nothing, a step every 20 ms."""
    control, data, admin = free_ports(3)
    address = f"tcp://127.0.0.1:{control}"
    log = tmp_path_factory.mktemp("worker") / "log"
    command = [
        *_kvrelay("decode-worker"), "--model", str(demo_directory), "--engine", "fake", "--address", address,
        "--data-address", f"tcp://127.0.0.1:{data}", "--admin-port", str(admin), "--admin-host", "127.0.0.1",
        "--fake-step-ms", str(STEP_S * 1e3), "--fake-token-us", "0", "--kv-memory-mb", "64",
    ]  # fmt: skip
    with log.open("wb") as file, subprocess.Popen(command, stderr=file) as process:
        try:
            _wait(lambda: _answers(f"http://127.0.0.1:{admin}/health/ready"), "a worker", log)
            yield address
        finally:
            process.terminate()
            process.wait(20)


@contextmanager
def gateway(directory: Path, worker_address: str, log: Path, processes: int, *more: str) -> Iterator[Group]:
    """Up, every process of it; killed afterwards if it has not ended."""
    command = [
        *_kvrelay("gateway"), "--model", str(directory), "--port", "0", "--workers", str(processes),
        "--decode-workers", worker_address, *more,
    ]  # fmt: skip
    with log.open("wb") as file, subprocess.Popen(command, stderr=file) as process:
        try:
            _wait(lambda: log.read_text().count(" serves") == processes, "the gateway", log)
            port = int(log.read_text().splitlines()[0].rpartition(":")[2])
            yield Group(psutil.Process(process.pid), f"http://127.0.0.1:{port}", log)
        finally:
            process.kill()


@asynccontextmanager
async def streams(group: Group, count: int, tokens: int, key: str | None = None) -> AsyncIterator[list[Stream]]:
    """So many streams under way, each on its own connection."""
    async with AsyncExitStack() as stack:
        found: list[Stream] = []
        for _ in range(count):
            client = await stack.enter_async_context(_client(group, key))
            response = await stack.enter_async_context(client.stream("POST", "/v1/completions", json=_body(tokens)))
            assert response.status_code == 200, await response.aread()
            found.append(Stream(response))
        yield found


async def test_all_processes_serve_and_their_metrics_add_up(
    demo_directory: Path, worker_address: str, tmp_path: Path
) -> None:
    with gateway(demo_directory, worker_address, tmp_path / "log", 3) as group:
        async with streams(group, 12, 300) as running:
            assert await _metric(group, "kvrelay_requests_in_flight") == 12 + 1
            owners = Counter(group.owners(running))
            assert set(owners) == {child.pid for child in group.children()}
            assert min(owners.values()) >= 2, owners  # 4 each, unless one was busy for long
            answers = await asyncio.gather(*(stream.ids() for stream in running))
        assert answers == [expected_output(PROMPT, 300, VOCAB_SIZE)] * 12
        for _ in range(4):  # whoever answers
            labels = {"route": "/v1/completions", "outcome": "200"}
            assert await _metric(group, "kvrelay_requests_total", **labels) == 12
            assert await _metric(group, "kvrelay_gateway_output_tokens_total") == 12 * 300
            assert await _metric(group, "kvrelay_time_to_first_token_seconds_count") == 12
            assert await _metric(group, "kvrelay_time_to_first_token_seconds_bucket", le="+Inf") == 12
            assert await _metric(group, "kvrelay_workers_up", role="decode") == 1
            assert await _metric(group, "kvrelay_gateway_process_deaths_total") == 0


async def test_a_killed_process_takes_its_own_streams_with_it_and_comes_back(
    demo_directory: Path, worker_address: str, tmp_path: Path
) -> None:
    with gateway(demo_directory, worker_address, tmp_path / "log", 2) as group:
        async with streams(group, 8, 150) as running:
            owners = group.owners(running)
            before = await _metric(group, "kvrelay_gateway_prompt_tokens_total")
            assert before == 8 * len(PROMPT)
            asking = asyncio.create_task(_ask_for_ever(group))
            victim = owners[0]
            psutil.Process(victim).kill()
            answers = await asyncio.gather(*(stream.ids() for stream in running))
            await _until(lambda: group.log.read_text().count(" serves") == 3, "the process that was killed", group.log)
            asking.cancel()
            num_refused, statuses = await asking
        whole = expected_output(PROMPT, 150, VOCAB_SIZE)
        assert answers == [None if owner == victim else whole for owner in owners]
        assert num_refused == 0
        assert set(statuses) == {200}  # never one that has no workers yet
        assert len(statuses) > 10
        assert await _metric(group, "kvrelay_gateway_prompt_tokens_total") == before  # what it had counted stays
        assert await _metric(group, "kvrelay_gateway_process_deaths_total") == 1
        assert await _metric(group, "kvrelay_requests_in_flight") == 1
        async with streams(group, 4, 50) as again:
            (new,) = {child.pid for child in group.children()} - set(owners)
            assert new in group.owners(again)
            assert [await stream.ids() for stream in again] == [whole[:50]] * 4
        text = group.log.read_text()
        assert "ended (killed by SIGKILL); it is started again in 0.1 s" in text
        assert "Traceback" not in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_all_processes(
    number: signal.Signals, demo_directory: Path, worker_address: str, tmp_path: Path
) -> None:
    with gateway(demo_directory, worker_address, tmp_path / "log", 2) as group:
        async with streams(group, 6, 100) as running:
            assert len(set(group.owners(running))) == 2
            children = group.children()
            group.parent.send_signal(number)
            answers = await asyncio.gather(*(stream.ids() for stream in running))
        assert answers == [expected_output(PROMPT, 100, VOCAB_SIZE)] * 6
        code = await asyncio.to_thread(group.parent.wait, 20)
        assert code == 0, group.log.read_text()
        assert not any(child.is_running() for child in children)
        text = group.log.read_text()
        assert text.endswith("gateway: stopped\n")
        assert "Traceback" not in text
        with pytest.raises(httpx.ConnectError):
            httpx.get(group.url, trust_env=False)


async def test_a_second_signal_does_not_wait_for_requests(
    demo_directory: Path, worker_address: str, tmp_path: Path
) -> None:
    with gateway(demo_directory, worker_address, tmp_path / "log", 2, "--drain-s", "100") as group:
        async with streams(group, 2, 3000):
            group.parent.terminate()
            await _until(lambda: not _accepts(group.url), "the closed port", group.log)
            group.parent.terminate()
            assert await asyncio.to_thread(group.parent.wait, 20) == 0


async def test_a_process_that_hangs_is_killed(demo_directory: Path, worker_address: str, tmp_path: Path) -> None:
    """Its health would be asked of the others for ever."""
    program = """
import dataclasses, socket, sys
from kvrelay.common.logs import configure_logs
from kvrelay.common.settings import build
from kvrelay.gateway.processes import Processes
from kvrelay.gateway.settings import GatewaySettings
configure_logs("info", "text")
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
settings = build(GatewaySettings, {"model": sys.argv[1], "decode_workers": sys.argv[2], "workers": 2})
sys.exit(Processes(settings, listener, hung_s=2.0).run())
"""
    log = tmp_path / "log"
    command = [sys.executable, "-P", "-c", program, str(demo_directory), worker_address]
    with log.open("wb") as file, subprocess.Popen(command, stderr=file) as process:
        try:
            await _until(lambda: log.read_text().count(" serves") == 2, "the gateway", log)
            hanging, other = psutil.Process(process.pid).children()
            hanging.suspend()
            await _until(lambda: log.read_text().count(" serves") == 3, "the process that was killed", log)
            assert not hanging.is_running()
            assert other.is_running()
            assert "has not answered for 2 s; it is killed" in log.read_text()
            process.terminate()
            assert await asyncio.to_thread(process.wait, 20) == 0
        finally:
            process.kill()


def test_children_end_with_a_killed_parent(demo_directory: Path, worker_address: str, tmp_path: Path) -> None:
    with gateway(demo_directory, worker_address, tmp_path / "log", 2) as group:
        children = group.children()
        assert len(children) == 2
        group.parent.kill()
        _, alive = psutil.wait_procs(children, timeout=20)
        assert alive == []
        assert not _accepts(group.url)


async def test_limits_of_an_api_key_hold_over_all_processes(
    demo_directory: Path, worker_address: str, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(
        f"busy {hash_key('kvr-busy')} concurrency=4\nquick {hash_key('kvr-quick')} requests_per_s=0.001 burst=5\n"
    )
    with gateway(demo_directory, worker_address, tmp_path / "log", 2, "--api-keys", str(keys)) as group:
        async with streams(group, 4, 3000, "kvr-busy") as running:
            owners = group.owners(running)
            assert len(set(owners)) == 2
            assert [await _status(group, "kvr-busy") for _ in range(6)] == [429] * 6
            # What a process that dies had running does not run any more.
            num_broken = owners.count(owners[0])
            psutil.Process(owners[0]).kill()
            await _until(lambda: group.log.read_text().count(" serves") == 3, "the process that was killed", group.log)
            async with streams(group, num_broken, 3000, "kvr-busy"):
                assert await _status(group, "kvr-busy") == 429
        statuses = [await _status(group, "kvr-quick") for _ in range(9)]
        assert statuses == [200] * 5 + [429] * 4


def test_what_no_process_can_load_is_told_once_and_ends_the_gateway(
    demo_directory: Path, worker_address: str, tmp_path: Path
) -> None:
    command = [*_kvrelay("gateway"), "--port", "0", "--workers", "3", "--decode-workers", worker_address]
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (broken / name).write_text("{}")
    cert, other_key = write_pair(tmp_path, "one")[0], write_pair(tmp_path, "other")[1]
    for more, code, says in (
        (["--model", str(broken)], 1, "tokenizer.json cannot be read"),
        (
            ["--model", str(demo_directory), "--tls-cert", str(cert), "--tls-key", str(other_key)],
            2,
            "is not the key of the certificate",
        ),
    ):
        ended = subprocess.run([*command, *more], capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == code, ended.stderr
        assert ended.stderr.count(says) == 1
        assert ended.stderr.splitlines()[-1].startswith("kvrelay: ")
        assert "Traceback" not in ended.stderr


# -- clients -----------------------------------------------------------------------------------------------------------


def _kvrelay(component: str) -> list[str]:
    return [sys.executable, "-P", "-m", "kvrelay.launcher", component]


def _client(group: Group, key: str | None = None) -> httpx.AsyncClient:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=group.url, timeout=60, trust_env=False, headers=headers)


def _body(tokens: int) -> dict[str, object]:
    return {
        "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip


async def _status(group: Group, key: str) -> int:
    """Of a short request, on a connection of its own."""
    async with _client(group, key) as client:
        return (await client.post("/v1/completions", json=_body(1))).status_code


async def _metric(group: Group, name: str, **labels: str) -> float:
    """Asked of whichever process takes the connection."""
    async with _client(group) as client:
        answer = await client.get("/metrics")
    assert answer.status_code == 200, answer.text
    found: Sequence[float] = [
        sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, (name, found)
    return found[0]


async def _ask_for_ever(group: Group) -> tuple[int, list[int]]:
    """How many connections were refused, and how the others' requests were answered, until cancelled.

    A connection that the killed process had taken breaks, as its streams do.
    """
    num_refused, statuses = 0, []
    try:
        while True:
            try:
                async with _client(group) as client:
                    statuses.append((await client.get("/health/ready")).status_code)
            except httpx.ConnectError:
                num_refused += 1
            except httpx.TransportError:
                pass
    except asyncio.CancelledError:
        return num_refused, statuses


def _accepts(url: str) -> bool:
    try:
        httpx.get(f"{url}/health/live", trust_env=False)
    except httpx.ConnectError:
        return False
    except httpx.TransportError:
        pass  # it stood in the queue when the port was closed
    return True


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, trust_env=False).status_code == 200
    return False


def _wait(holds: Callable[[], bool], what: str, log: Path, timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, f"{what} did not come: {log.read_text()}"
        time.sleep(0.02)  # polls for a state, bounded by the deadline above


async def _until(holds: Callable[[], bool], what: str, log: Path) -> None:
    await asyncio.to_thread(_wait, holds, what, log)
