"""Gateways and workers as separate processes, which can be killed, stopped, drained, cut off and started anew.

Connections to a worker's control socket go through a proxy of this process, which can cut or hold them. As on a cluster, a process
that has ended is started anew (:meth:`Fleet.keep`).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import kvrelay
from kvrelay.launcher.local.ports import free_ports

from .figures import MIB

MODEL_NAME = "model"  # in the API
READY_S, END_S, CALM_S = 300.0, 60.0, 8.0  # a busy machine needs minutes to load all models at once
_LOOK_S = 0.1


class Life(enum.Enum):
    """The state of a member after the last signal that we sent."""

    RUNNING = "running"
    STOPPED = "stopped"
    ENDING = "ending"  # SIGTERM
    DEAD = "dead"


class Cable:
    """A TCP proxy in front of one port."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self.port = 0

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Cut all connections and stop listening."""
        self.cut()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def cut(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            writer.transport.abort()  # type: ignore[attr-defined]

    async def hold(self, seconds: float) -> None:
        """Let nothing through for a while. The connections stay open."""
        self._flows.clear()
        await asyncio.sleep(seconds)
        self._flows.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            onward = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()  # type: ignore[attr-defined]
            return
        pair = {writer, onward[1]}
        self._writers |= pair
        try:
            await asyncio.gather(self._pump(reader, onward[1]), self._pump(onward[0], writer))
        finally:
            self._writers -= pair
            for end in pair:
                end.transport.abort()  # type: ignore[attr-defined]

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()  # type: ignore[attr-defined]


@dataclass(eq=False)
class Member:
    """One process, and how to start it."""

    name: str
    command: list[str]
    url: str  # of health and metrics
    log: Path
    cable: Cable | None = None  # the proxy in front of its control socket
    ports: Mapping[str, int] = field(default_factory=dict)  # a worker's: control, and data of a decode worker
    life: Life = Life.DEAD
    process: subprocess.Popen[bytes] | None = None
    exit_codes: list[int] = field(default_factory=list)
    ready_s: float | None = None  # since when it is ready, by the monotonic clock

    @property
    def role(self) -> str:
        """gateway, prefill or decode."""
        return self.name.rpartition("-")[0]

    @property
    def pid(self) -> int:
        """The process id."""
        assert self.process is not None, f"{self.name} was never started"
        return self.process.pid

    def start(self) -> None:
        """Start a new process."""
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=_environment()
            )
        self.life, self.ready_s = Life.RUNNING, None

    def signal(self, number: signal.Signals, life: Life) -> None:
        """Send a signal; from now on the member is in ``life``."""
        self.life, self.ready_s = life, None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def fetch(self, path: str, timeout_s: float = 5.0) -> str | None:
        """The body of a 200 answer, or None."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=timeout_s) as answer:
                body: bytes = answer.read()
                return body.decode()
        except (OSError, urllib.error.URLError):
            return None

    async def is_ready(self) -> bool:
        """Whether the member reports that it is ready."""
        return await asyncio.to_thread(self.fetch, "/health/ready", 1.0) is not None

    def ledger(self) -> dict[str, Any]:
        """The ledger of a running worker's blocks, and its number of requests."""
        body = self.fetch("/debug/kv", 30.0)
        assert body is not None, f"{self.name} does not tell its ledger; its log is {self.log}"
        state: dict[str, Any] = json.loads(body)
        return {**state["ledger"], "num_requests": len(state["requests"])}

    def counted(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = (self.fetch("/metrics", 30.0) or "").splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def figures(self) -> Figures:
        """The resources that the process holds now."""
        process = psutil.Process(self.pid)
        return Figures(process.memory_info().rss / MIB, process.num_fds(), process.num_threads())


@dataclass(frozen=True)
class Figures:
    """The resources that one process holds."""

    rss_mib: float
    num_descriptors: int
    num_threads: int


class Fleet:
    """All members. Use within ``async with fleet(...)``."""

    def __init__(self, members: list[Member]) -> None:
        self.members = {member.name: member for member in members}
        self._keeper: asyncio.Task[None] | None = None

    def of(self, *roles: str) -> list[Member]:
        """The members of these roles."""
        return [member for member in self.members.values() if member.role in roles]

    @property
    def workers(self) -> list[Member]:
        """Prefill and decode workers."""
        return self.of("prefill", "decode")

    async def wait_ready(self, members: Iterable[Member] | None = None) -> None:
        """Wait until all members are ready."""
        waiting = list(self.members.values() if members is None else members)
        until_s = time.monotonic() + READY_S
        while any(member.ready_s is None for member in waiting):
            assert time.monotonic() < until_s, f"not ready: {[one.name for one in waiting if one.ready_s is None]}"
            await asyncio.sleep(_LOOK_S)

    async def keep(self) -> None:
        """Note which members are ready, and start ended ones anew."""
        while True:
            for member in self.members.values():
                assert member.process is not None
                code = member.process.poll()
                if code is not None:
                    member.exit_codes.append(code)
                    member.start()
                elif member.life is Life.RUNNING and member.ready_s is None and await member.is_ready():
                    member.ready_s = time.monotonic()
            await asyncio.sleep(_LOOK_S)

    async def wait_idle(self, timeout_s: float) -> float:
        """Wait until no worker holds anything of a request. Returns the seconds that took."""
        begun_s = time.monotonic()
        while True:
            ledgers = {one.name: await asyncio.to_thread(one.ledger) for one in self.workers}
            busy = {
                name: ledger
                for name, ledger in ledgers.items()
                if ledger["num_requests"] or ledger["leased"] or ledger["running"] or not ledger["balances"]
            }
            if not busy:
                return time.monotonic() - begun_s
            assert time.monotonic() < begun_s + timeout_s, f"after {timeout_s:g} s still held: {busy}"
            await asyncio.sleep(_LOOK_S)

    async def calm_figures(self, before: Mapping[str, Figures] | None = None) -> dict[str, Figures]:
        """The figures of all processes, once their numbers of descriptors are stable: connections of ended clients are closed.

        With ``before`` it also waits until no process has more descriptors than then, up to ``CALM_S``.
        """
        until_s = time.monotonic() + CALM_S
        last: dict[str, Figures] = {}
        while True:
            figures = {name: member.figures() for name, member in self.members.items()}
            are_stable = all(
                name in last and last[name].num_descriptors == one.num_descriptors for name, one in figures.items()
            )
            are_back = before is None or all(
                one.num_descriptors <= before[name].num_descriptors for name, one in figures.items()
            )
            if (are_stable and are_back) or time.monotonic() > until_s:
                return figures
            last = figures
            await asyncio.sleep(5 * _LOOK_S)


@asynccontextmanager
async def fleet(
    directory: Path,
    *,
    model: Path,
    num_prefills: int,
    num_decodes: int,
    num_gateways: int,
    worker_options: list[str],
    gateway_options: list[str],
    decode_options: Sequence[str] = (),
    keys: Path | None = None,
) -> AsyncIterator[Fleet]:
    """A fleet that is ready; it is ended afterwards. Logs are in ``directory``. ``decode_options`` are for decode workers only."""
    security = [] if keys is None else ["--keys", str(keys)]
    ports = iter(free_ports(2 * num_prefills + 3 * num_decodes + num_gateways))
    members: list[Member] = []
    addresses: dict[str, list[str]] = {"prefill": [], "decode": []}
    for role, count in (("prefill", num_prefills), ("decode", num_decodes)):
        for index in range(count):
            own, admin = {"control": next(ports)}, next(ports)
            cable = Cable(own["control"])
            await cable.start()
            addresses[role].append(f"tcp://127.0.0.1:{cable.port}")
            where = ["--address", f"tcp://127.0.0.1:{own['control']}", "--admin-port", str(admin)]
            if role == "decode":
                own["data"] = next(ports)
                where += ["--data-address", f"tcp://127.0.0.1:{own['data']}", *decode_options]
            name = f"{role}-{index}"
            command = _command(f"{role}-worker", model, [*where, *worker_options, *security])
            members.append(Member(name, command, f"http://127.0.0.1:{admin}", directory / f"{name}.log", cable, own))
    for index in range(num_gateways):
        port = next(ports)
        where = ["--port", str(port), "--prefill-workers", ",".join(addresses["prefill"])]
        where += ["--decode-workers", ",".join(addresses["decode"]), "--served-model-name", MODEL_NAME]
        command = _command("gateway", model, [*where, *gateway_options, *security])
        members.append(
            Member(f"gateway-{index}", command, f"http://127.0.0.1:{port}", directory / f"gateway-{index}.log")
        )
    made = Fleet(members)
    for member in members:
        member.start()
    keeper = asyncio.create_task(made.keep())
    try:
        await made.wait_ready()
        yield made
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await _end(members)


async def _end(members: list[Member]) -> None:
    """End all processes, gateways first, so that no gateway waits for a worker."""
    for member in sorted(members, key=lambda one: one.role != "gateway"):
        assert member.process is not None
        member.signal(signal.SIGCONT, Life.ENDING)
        member.process.terminate()
        try:
            await asyncio.to_thread(member.process.wait, END_S)
        except subprocess.TimeoutExpired:
            member.process.kill()
            await asyncio.to_thread(member.process.wait)
    for member in members:
        if member.cable is not None:
            await member.cable.stop()


def _command(component: str, model: Path, options: list[str]) -> list[str]:
    return [sys.executable, "-P", "-m", "kvrelay.launcher", component, "--model", str(model), *options]


def _environment() -> dict[str, str]:
    """Members run the kvrelay that this process runs, and find nothing else by the path of this process."""
    kept = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("KVRELAY_")
    }
    return {**kept, "PYTHONPATH": str(Path(kvrelay.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
