"""The capture of graphs, with stand-ins for CUDA's calls. ``test_ops_cuda`` shows what a graph computes.

Ranks are threads here, and their collectives a barrier.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from kvrelay.engine.backends.cuda.build import agreed_graphs
from kvrelay.engine.backends.cuda.graphs import Agree, CudaRecorder, DecodeGraphs, ladder
from kvrelay.engine.backends.cuda.inputs import GraphInputs
from kvrelay.engine.config.cut import Cut
from kvrelay.engine.models.ranks import RankPart
from kvrelay.engine.step.uploads import Uploader


class PlayedStream:
    """A stream on which nothing waits."""

    def wait_stream(self, other: PlayedStream) -> None:
        pass


class PlayedCuda:
    """Stands for torch.cuda, and records the stream of every run and capture."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = self.main = PlayedStream()
        self.streams: list[PlayedStream] = []
        self.pools: set[object] = set()
        self.modes: set[str] = set()
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
    def _captured(
        self, graph: Any, pool: object, stream: PlayedStream | None = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        """Without a stream given, torch captures on one of its own."""
        self.pools.add(pool)
        self.modes.add(capture_error_mode)
        with self._on(stream or PlayedStream()):
            yield


class PlayedGraph:
    def replay(self) -> None:
        pass


def test_all_graphs_are_captured_on_one_stream_beside_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS keeps a workspace for each stream with products, and the pool's size does not account for more of them."""
    cuda = PlayedCuda(monkeypatch)
    recorder = CudaRecorder()
    used: list[PlayedStream] = []
    for _ in range(3):
        recorder.warm_up(lambda: used.append(cuda.now))
        recorder.capture(lambda: used.append(cuda.now))()
    assert cuda.now is cuda.main
    assert used == cuda.streams * 6
    assert len(cuda.pools) == 1


@pytest.mark.parametrize(("of_several_ranks", "mode"), [(False, "global"), (True, "thread_local")])
def test_what_another_thread_asks_the_device_ends_no_capture_of_several_ranks(
    monkeypatch: pytest.MonkeyPatch, of_several_ranks: bool, mode: str
) -> None:
    """NCCL's watchdog queries the device at any time, so captures of several ranks use another error mode."""
    cuda = PlayedCuda(monkeypatch)
    CudaRecorder(of_several_ranks=of_several_ranks).capture(lambda: None)
    assert cuda.modes == {mode}


class PlayedRanks:
    """Collectives of two ranks that run the same steps. A rank that waits in vain fails after 10 s."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=10)
        self._numbers: list[int] = []
        self.num_meetings = 0

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of both ranks, which have equal parts."""
        self._meet()
        return partial.mul_(2)

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        raise NotImplementedError

    def least(self, number: int) -> int:
        self._numbers.append(number)
        self._meet()
        least = min(self._numbers[-2:])
        self._barrier.wait()
        return least

    def _meet(self) -> None:
        if self._barrier.wait() == 0:
            self.num_meetings += 1


class PlayedRecorder:
    """Records the sizes of captured steps. A capture of ``fails_at`` rows fails. Captures compute nothing, so no rank
    meets another."""

    def __init__(self, sizes_of: Callable[[], int], fails_at: int | None) -> None:
        self.captured: list[int] = []
        self._size = sizes_of
        self._fails_at = fails_at

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        if self._size() == self._fails_at:
            raise torch.OutOfMemoryError("no memory for a capture")
        self.captured.append(self._size())
        return run


def capture_on_a_rank(
    ranks: PlayedRanks, rank: int, fails_at: int | None, num_stages: int = 1
) -> tuple[DecodeGraphs | None, list[int]]:
    """The graphs of one rank, and their numbers of rows in the order of capture."""
    last = [0]

    def forward(token_ids: torch.Tensor, _: object) -> torch.Tensor:
        last[0] = len(token_ids)
        return ranks.sum(torch.ones(len(token_ids), 8))

    def capture(agree: Agree | None) -> DecodeGraphs:
        device = torch.device("cpu")
        return DecodeGraphs(
            forward,
            lambda num_rows, longest: GraphInputs(Uploader(device), 1, num_rows, 0, device, longest),
            lambda deltas: None,
            recorder,
            logits=torch.zeros(MOST_ROWS, 8),
            lengths=(64,),
            agree=agree,
        )

    recorder = PlayedRecorder(lambda: last[0], fails_at)
    part = RankPart(Cut(rank, 2, num_stages=num_stages), ranks, lambda told: told, num_local=2)
    return agreed_graphs(part, capture), recorder.captured


MOST_ROWS = 20


def test_all_ranks_capture_the_same_in_the_same_order() -> None:
    """Each rank meets the others before and after a capture."""
    ranks = PlayedRanks()
    with ThreadPoolExecutor(2) as threads:
        (one, of_one), (other, of_other) = threads.map(lambda rank: capture_on_a_rank(ranks, rank, None), range(2))
    assert one is not None
    assert other is not None
    assert of_one == of_other == list(reversed(ladder(MOST_ROWS)))
    assert ranks.num_meetings == 2 * len(of_one)


@pytest.mark.parametrize("fails_at", [MOST_ROWS, 2])
def test_if_a_rank_cannot_capture_a_step_all_launch_kernel_by_kernel(
    caplog: pytest.LogCaptureFixture, fails_at: int
) -> None:
    """Both ranks log the reason, and neither waits for the other."""
    ranks = PlayedRanks()
    with ThreadPoolExecutor(2) as threads:
        (one, _), (other, _) = threads.map(
            lambda rank: capture_on_a_rank(ranks, rank, fails_at if rank == 1 else None), range(2)
        )
    assert one is None
    assert other is None
    begins = "decode steps are launched kernel by kernel, without CUDA graphs: "
    said = sorted(record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert said == [
        f"{begins}another rank could not capture a step of {fails_at}",
        f"{begins}this rank could not capture a step of {fails_at}: no memory for a capture",
    ]


def test_stages_have_no_graphs() -> None:
    assert capture_on_a_rank(PlayedRanks(), 0, None, num_stages=2) == (None, [])
