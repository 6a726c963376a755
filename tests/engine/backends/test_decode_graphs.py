"""How graphs are captured, with the calls to CUDA played: what a graph computes is shown in ``test_ops_cuda``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvrelay.engine.backends.cuda.graphs import CudaRecorder


class PlayedStream:
    """Nothing waits for anything."""

    def wait_stream(self, other: PlayedStream) -> None:
        pass


class PlayedCuda:
    """Which stream every run and every capture is on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = self.main = PlayedStream()
        self.streams: list[PlayedStream] = []
        self.pools: set[object] = set()
        patch.setattr(torch.cuda, "Stream", self._made)
        patch.setattr(torch.cuda, "stream", self._on)
        patch.setattr(torch.cuda, "graph", self._captured)
        patch.setattr(torch.cuda, "current_stream", lambda: self.now)
        patch.setattr(torch.cuda, "graph_pool_handle", object)
        patch.setattr(torch.cuda, "CUDAGraph", PlayedGraph)

    def _made(self) -> PlayedStream:
        self.streams.append(PlayedStream())
        return self.streams[-1]

    @contextlib.contextmanager
    def _on(self, stream: PlayedStream) -> Iterator[None]:
        self.now, before = stream, self.now
        yield
        self.now = before

    @contextlib.contextmanager
    def _captured(self, graph: Any, pool: object, stream: PlayedStream | None = None) -> Iterator[None]:
        """torch makes a stream of its own for all captures, if it is given none."""
        self.pools.add(pool)
        with self._on(stream or PlayedStream()):
            yield


class PlayedGraph:
    def replay(self) -> None:
        pass


def test_all_graphs_are_captured_on_one_stream_beside_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """On each that a product runs on, cuBLAS keeps a workspace, which nobody reckoned with when the pool was sized."""
    cuda = PlayedCuda(monkeypatch)
    recorder = CudaRecorder()
    used: list[PlayedStream] = []
    for _ in range(3):
        recorder.record(lambda: used.append(cuda.now))()
    assert cuda.now is cuda.main
    assert used == cuda.streams * 6
    assert len(cuda.pools) == 1
