"""A prefill and a decode worker, each a process of its own on a fake engine, as somebody outside of them sees them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvrelay.launcher.ports import check_free
from kvrelay.wire.keys import make_keys

from .figures import num_descriptors, rss_mib, wait_until

READY_S, STOP_S = 60.0, 20.0
VOCAB = 1000


@dataclass(frozen=True)
class WorkerProcess:
    """One of them. ``ports``: control, and of the decode worker data."""

    role: str
    pid: int
    admin_port: int
    ports: dict[str, int]
    log: Path

    def address(self, port: str = "control") -> str:
        return f"tcp://127.0.0.1:{self.ports[port]}"

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/health/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:  # not up yet, or not ready
            return False

    def counted(self, name: str) -> float:
        """The sum of a counter's samples."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def is_idle(self) -> bool:
        """Whether every block is free or cached."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/debug/kv", timeout=10) as answer:
            ledger: dict[str, int] = json.load(answer)["ledger"]
        return ledger["free"] + ledger["cached"] == ledger["num_blocks"]

    def log_lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()

    def descriptors(self) -> int:
        return num_descriptors(self.pid)

    def rss_mib(self) -> float:
        return rss_mib(self.pid)


@dataclass(frozen=True)
class Workers:
    """Both, and the directory of keys that they were started with, if any."""

    prefill: WorkerProcess
    decode: WorkerProcess
    keys: Path | None

    @property
    def all(self) -> tuple[WorkerProcess, WorkerProcess]:
        return (self.prefill, self.decode)


@contextmanager
def workers(directory: Path, *, with_keys: bool, log_level: str = "debug") -> Iterator[Workers]:
    """Both up and ready; ended afterwards by SIGTERM, to which they must answer with 0. Their logs lie in ``directory``."""
    model = directory / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "max_position_embeddings": 4096}))
    (model / "tokenizer.json").write_text("{}")  # workers read none, but a model's directory has one
    keys = directory / "keys" if with_keys else None
    if keys is not None:
        make_keys(keys)
    options = ["--model", str(model), "--engine", "fake", "--fake-step-ms", "0", "--num-blocks", "512"]
    options += ["--log-level", log_level, *([] if keys is None else ["--keys", str(keys)])]
    with ExitStack() as stack:
        prefill = stack.enter_context(_worker("prefill", options, directory, ("control",)))
        decode = stack.enter_context(_worker("decode", options, directory, ("control", "data")))
        for worker in (prefill, decode):
            wait_until(worker.is_ready, READY_S, f"{worker.role} worker ready; its log: {worker.log_lines()[-3:]}")
        yield Workers(prefill, decode, keys)


@contextmanager
def _worker(role: str, options: list[str], directory: Path, names: tuple[str, ...]) -> Iterator[WorkerProcess]:
    ports: dict[str, int] = {}
    admin_port = check_free("127.0.0.1", 0)
    where = ["--admin-port", str(admin_port)]
    for name in names:
        ports[name] = check_free("127.0.0.1", 0)
        where += ["--address" if name == "control" else "--data-address", f"tcp://127.0.0.1:{ports[name]}"]
    log = directory / f"{role}.log"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvrelay.launcher", f"{role}-worker", *options, *where],
            stderr=file,
            stdout=file,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    try:
        yield WorkerProcess(role, process.pid, admin_port, ports, log)
        process.terminate()
        code = process.wait(STOP_S)
        assert code == 0, f"the {role} worker left with {code}; its log: {log.read_text()[-2000:]}"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
