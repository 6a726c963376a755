"""Decode steps as CUDA graphs: one launch instead of a few hundred.

A graph replays what was captured, on the same memory. So each batch size of a ladder has buffers of its own for the step's
numbers; one copy from the host brings a step into those of the next larger size, and its last rows are padding: no keys to read,
and K/V that go to a block which is nobody's. Block tables are the slots' own, on the device, and kernels read all lengths there
(:mod:`kvrelay.kernels.attention.decode`), so one graph serves all.

All graphs are captured at the start: a shape that is met for the first time must not stall a stream. They share one memory pool,
because only one runs at a time; so a step's logits last until the next step is launched. A step whose sampling is deferred must
have been told to sample by then, which changes the logits in place: the next replay, behind it on the stream, writes them all anew.

Graphs of several ranks hold their collectives. Either all ranks capture a collective or none does, and a replay is as much a
collective as what is in it (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/cudagraph.html). So ranks capture the
same sizes in one order, and agree behind each capture that all have it; if one has not, none has graphs.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch

from kvrelay.engine.backends.cuda.inputs import GraphInputs, StepInputs
from kvrelay.engine.backends.cuda.low_rank import AdaptedSteps
from kvrelay.engine.step.batch import Batch
from kvrelay.engine.step.plan import TableDelta
from kvrelay.kernels.linear.low_rank import AdaptedRows

logger = logging.getLogger(__name__)

Replay = Callable[[], None]


Agree = Callable[[bool], bool]
"""Told whether this rank could, returns whether all ranks could; each waits for the others."""


class CaptureError(Exception):
    """This rank or another one could not capture a graph: none has any."""


class Recorder(Protocol):
    """What makes a graph of a function's kernels (:class:`CudaRecorder`)."""

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run it once, before its capture: kernels must be compiled, and libraries have their workspaces and connections."""

    def capture(self, run: Callable[[], None]) -> Replay:
        """How to run it again, on the same memory. Raises RuntimeError."""


class CudaRecorder:
    """Captures CUDA graphs into one memory pool. Implements :class:`Recorder`."""

    def __init__(self, *, of_several_ranks: bool = False) -> None:
        """``of_several_ranks``: NCCL's own thread asks the device how far earlier collectives are, which must not end a capture."""
        self._mode = "thread_local" if of_several_ranks else "global"
        self._pool = torch.cuda.graph_pool_handle()
        # One for all graphs: cuBLAS keeps a workspace of tens of MiB for every stream that it ever ran on.
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def warm_up(self, run: Callable[[], None]) -> None:
        """See Recorder."""
        side = self._side
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)

    def capture(self, run: Callable[[], None]) -> Replay:
        """See Recorder."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode=self._mode):
            run()
        return graph.replay


@dataclass(frozen=True, slots=True)
class _Rung:
    token_ids: torch.Tensor  # [batch_size] int64
    inputs: GraphInputs
    adapted: AdaptedRows | None  # None: of steps without adapters
    replay: Replay


def ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: close enough that padding is cheap, few enough that a start is quick. The largest is the most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """The graphs of one engine. Implements :class:`kvrelay.engine.models.ops.StepGraphs`. Model thread only."""

    def __init__(
        self,
        forward: Callable[[torch.Tensor, StepInputs], torch.Tensor],
        inputs_of: Callable[[int, int], GraphInputs],
        update_tables: Callable[[Seq[TableDelta]], None],
        recorder: Recorder,
        *,
        logits: torch.Tensor,
        heard: Seq[torch.Tensor] = (),
        lengths: Seq[int],
        adapted: AdaptedSteps | None = None,
        agree: Agree | None = None,
    ) -> None:
        """Capture them all. Raises CaptureError if not all of several ranks could, on all of them at the same graph.

        ``forward``: logits ``[n, vocab]`` of ``n`` tokens, one for each sequence. ``inputs_of`` so many, of sequences up to a
        length. ``update_tables``: the slots' block tables on the device. ``logits``: ``[max_num_seqs, vocab]``, where all graphs
        leave theirs.
        ``heard``: ``[max_num_seqs, hidden]`` each, where ``forward`` leaves what a head reads; see StepGraphs.
        ``lengths``: of sequences, ascending, up to which there are graphs of their own; the last one is the longest possible.
        ``adapted``: what steps with adapters are made of, which have graphs of their own; None: they have none.
        ``agree``: of several ranks, else None.
        """
        self._inputs_of = inputs_of
        self._update_tables = update_tables
        self._adapted = adapted
        # By size, longest sequence, and whether rows may have adapters.
        self._rungs: dict[tuple[int, int, bool], _Rung] = {}
        self._logits = logits
        self._heard = heard
        self._agree = agree
        sizes = ladder(len(logits))
        # The largest first: the smaller ones then find room in what it left in the pool.
        for done, size in enumerate(reversed(sizes)):
            logger.info("capturing decode graphs: %d of %d, batches of up to %d", done + 1, len(sizes), size)
            for longest in reversed(lengths):
                self._rungs[size, longest, False] = self._capture(forward, recorder, size, longest, None)
                if adapted is not None:
                    self._rungs[size, longest, True] = self._capture(forward, recorder, size, longest, adapted)
        self._sizes, self._lengths = sizes, lengths

    def _capture(
        self,
        forward: Callable[[torch.Tensor, StepInputs], torch.Tensor],
        recorder: Recorder,
        size: int,
        longest: int,
        adapted: AdaptedSteps | None,
    ) -> _Rung:
        token_ids = torch.zeros(size, dtype=torch.int64, device=self._logits.device)
        inputs = self._inputs_of(size, longest)

        def run() -> None:
            # Of its own, each would stay in memory. The copy takes some microseconds.
            self._logits[:size] = forward(token_ids, inputs.inputs)

        if adapted is None:
            return _Rung(token_ids, inputs, None, self._recorded(run, recorder, size))
        rows = adapted.no_rows(size, adapted.tilings[0])
        with adapted.over(rows):
            return _Rung(token_ids, inputs, rows, self._recorded(run, recorder, size))

    def _recorded(self, run: Callable[[], None], recorder: Recorder, size: int) -> Replay:
        # Not agreed upon: a rank that fails here has left the others alone in a collective, which ends all of them.
        recorder.warm_up(run)
        if self._agree is None:
            return recorder.capture(run)
        replay: Replay | None = None
        why = f"another rank could not capture a step of {size}"
        try:
            replay = recorder.capture(run)
        except RuntimeError as error:
            why = f"this rank could not capture a step of {size}: {error}"
        if not self._agree(replay is not None) or replay is None:
            raise CaptureError(why)
        return replay

    def fits(self, batch: Batch) -> bool:
        """See StepGraphs. Every row must decode, and there must not be too many."""
        if batch.adapters is not None and self._adapted is None:
            return False
        return batch.num_decode_rows == len(batch.rows) == len(batch.sampling_rows) <= self._sizes[-1]

    def run(self, batch: Batch, token_ids: torch.Tensor) -> torch.Tensor:
        """See StepGraphs."""
        self._update_tables(batch.table_deltas)
        num_rows = len(batch.rows)
        size = self._sizes[bisect.bisect_left(self._sizes, num_rows)]
        longest = self._lengths[bisect.bisect_left(self._lengths[:-1], int(batch.seq_lens.max()))]
        rung = self._rungs[size, longest, batch.adapters is not None]
        rung.token_ids[:num_rows] = token_ids
        rung.inputs.fill(batch)
        if rung.adapted is not None:
            assert self._adapted is not None, "captured without adapters"
            self._adapted.fill(rung.adapted, batch)
        rung.replay()
        return self._logits[:num_rows]

    def heard(self, num_rows: int) -> list[torch.Tensor]:
        """See StepGraphs."""
        return [one[:num_rows] for one in self._heard]
