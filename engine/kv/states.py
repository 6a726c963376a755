"""The states of recurrent layers in the pool: where they are, and how a step reads and replaces them.

A group of states is a group with a small window (:data:`kvrelay.common.kv_geometry.STATE_WINDOW`). A block of it holds the state
after the block's last computed token, layer by layer. So tables, ledger, prefix cache and hand-off need no case for it: whoever has
a full block can continue behind it. A step computes a prompt block by block, so that each block gets its state.

In front of a state is its position, the number of tokens that it is of. Whoever computes a token twice, or leaves one out, reads a
state of another position. On a CPU this raises.

Layers of transformers compute part by part, with copies of states. A layer that has kernels computes the whole step at once, over
the states in the pool (:class:`RecurrentKernels`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.engine.config.model import ModelShape, StateTensor
from kvrelay.engine.kv.geometry import POSITION_NBYTES, LayerGroups, state_offsets
from kvrelay.engine.step.batch import Batch
from kvrelay.kernels.recurrent.ragged import DeltaInputs, RaggedStates, SpaceInputs

Upload = Callable[[Sequence[npt.NDArray[Any]]], list[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class LayerStates:
    """A layer's states in the pool, for kernels, which replace them."""

    conv: torch.Tensor  # [num_blocks, num_channels, width]
    recurrent: torch.Tensor  # [num_blocks, num_heads, …] fp32
    ragged: RaggedStates


class RecurrentKernels(Protocol):
    """Compute a layer's recurrence for all tokens of a step at once: ``[num_tokens, num_heads, size of a head's output]``.

    What is mixed in ``inputs`` first passes a causal convolution with ``weight`` ``[num_channels, width]`` and ``bias``
    ``[num_channels]``, and silu.
    """

    def delta_rule(
        self, inputs: DeltaInputs, weight: torch.Tensor, bias: torch.Tensor | None, states: LayerStates
    ) -> torch.Tensor:
        """A gated delta rule over states ``[…, key_size, value_size]``."""

    def state_space(
        self, inputs: SpaceInputs, weight: torch.Tensor, bias: torch.Tensor | None, states: LayerStates
    ) -> torch.Tensor:
        """A selective state space over states ``[…, head_size, state_size]``."""


Recurrence = Callable[[RecurrentKernels, LayerStates], torch.Tensor]
"""What a layer asks of kernels; gives its outputs."""


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of a step that a layer computes at once: as many of each sequence, all of one block."""

    first: int  # of the step's tokens
    num_tokens: int  # of each sequence
    starts: npt.NDArray[np.int64]  # [num_seqs] positions of the first tokens
    read: torch.Tensor  # [num_groups, num_seqs] the blocks that hold the states before them; any for position 0
    write: torch.Tensor  # [num_groups, num_seqs] the blocks that get the states behind them
    is_new: torch.Tensor  # [num_seqs, 1] whether a sequence starts at position 0
    ends: torch.Tensor  # [num_seqs] positions behind the last tokens

    @property
    def num_seqs(self) -> int:
        """Its sequences."""
        return len(self.starts)

    @property
    def end(self) -> int:
        """Behind the last of its tokens in the step."""
        return self.first + self.num_seqs * self.num_tokens


class StatePool:
    """All states of a model."""

    def __init__(
        self, shape: ModelShape, pool: torch.Tensor, upload: Upload, kernels: RecurrentKernels | None = None
    ) -> None:
        """``pool``: as :attr:`kvrelay.engine.kv.pool.KvPool.tensor`. ``upload``: brings arrays to its device. ``kernels``:
        compute whole steps, if a backend has them.
        """
        self.block_size = pool.shape[4]
        self._groups = LayerGroups.of_shape(shape, self.block_size)
        self._first_layer = len(shape.sliding_windows)
        self._tensors = shape.states
        self._offsets = [state_offsets(tensors) for tensors in shape.states]
        self._bytes = pool.view(len(pool), -1).view(torch.uint8)
        self._itemsize = pool.element_size()
        self._upload = upload
        self._kernels = kernels

    def begin_step(self, batch: Batch) -> StateStep:
        """The states of the batch's sequences. A sequence may have one row only."""
        split = batch.num_decode_rows
        rows, starts = list(range(split)), [row.start for row in batch.rows[:split]]  # of each sequence of each part
        shapes = [(0, split, 1)] if split else []  # of each part: its first token, its sequences, tokens of each
        for row in range(split, len(batch.rows)):
            first, end = batch.query_start_loc[row : row + 2].tolist()
            start = batch.rows[row].start
            while first < end:
                num_tokens = min(end - first, self.block_size - start % self.block_size)
                rows.append(row)
                starts.append(start)
                shapes.append((first, 1, num_tokens))
                first, start = first + num_tokens, start + num_tokens
        _, num_seqs, lengths = zip(*shapes, strict=True)
        counts = np.repeat(lengths, num_seqs)
        numbers = self._numbers(batch, rows, np.array(starts), counts)
        of_seqs = () if self._kernels is None else self._of_seqs(np.array(rows), np.array(starts), counts, *numbers[:3])
        # One upload for all parts: each would take one of the uploader's few buffers.
        there = self._upload((*numbers, *of_seqs))
        parts: list[Part] = []
        behind = 0
        for first, count, num_tokens in shapes:
            own, behind = slice(behind, behind + count), behind + count
            read, write, is_new, ends = (one[..., own] for one in there[:4])
            parts.append(Part(first, num_tokens, np.array(starts[own]), read, write, is_new[:, None], ends))
        whole = None
        if self._kernels is not None:
            firsts = of_seqs[3][:-1]
            whole = WholeStep(np.array(starts)[firsts], there[1], there[3], *there[4:])
        return StateStep(self, parts, whole)

    def _numbers(
        self, batch: Batch, rows: list[int], starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[Any], ...]:
        """``read``, ``write``, ``is_new`` and ``ends`` for all parts; see :class:`Part`."""
        tables, slots, ends = batch.slot_tables[self._groups.num_attention :], batch.slots[rows], starts + counts
        read = tables[:, slots, np.maximum(starts - 1, 0) // self.block_size]
        return read, tables[:, slots, (ends - 1) // self.block_size], starts == 0, ends

    def _of_seqs(
        self,
        rows: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        read: npt.NDArray[Any],
        write: npt.NDArray[Any],
        is_new: npt.NDArray[np.bool_],
    ) -> tuple[npt.NDArray[Any], ...]:
        """The tensors of a WholeStep from ``begun`` on. Given are numbers of its parts, whose rows ascend."""
        firsts = np.flatnonzero(np.diff(rows, prepend=-1))
        seqs = np.repeat(np.searchsorted(firsts, np.arange(len(rows)), side="right") - 1, counts)
        token_starts = np.concatenate(([0], counts.cumsum()))
        numbers = (seqs, token_starts, np.append(firsts, len(rows)))
        begun = write[:, starts % self.block_size == 0]
        return (begun, *(one.astype(np.int32) for one in numbers), read[:, firsts], is_new[firsts])

    def read(self, part: Part, layer: int) -> torch.Tensor:
        """Copies of a layer's states before the part: bytes ``[num_seqs, size]``, which :meth:`tensors` divides.

        Zeros at position 0. ``layer``: among the recurrent ones.
        """
        group, columns = self._place(layer)
        states = self._bytes[part.read[group], columns]
        if states.device.type == "cpu":
            _require_positions(states, part.starts)
        return states.masked_fill_(part.is_new, 0)

    def write(self, part: Part, layer: int, states: torch.Tensor) -> None:
        """Store a layer's states behind the part; takes over ``states``."""
        group, columns = self._place(layer)
        _positions(states).copy_(part.ends)
        self._bytes[part.write[group], columns] = states

    def compute(self, whole: WholeStep, layer: int, recurrence: Recurrence) -> torch.Tensor:
        """A layer's outputs for all tokens of a step; replaces its states. There must be kernels."""
        assert self._kernels is not None, "nothing computes whole steps"
        group, columns = self._place(layer)
        here, read, write = self._bytes[:, columns], whole.read[group], whole.write[group]
        if here.device.type == "cpu":
            is_old = whole.starts > 0
            _require_positions(here[read[torch.from_numpy(is_old)]], whole.starts[is_old])
        in_place = {one.kind: tensor for one, tensor in self.tensors(layer, here)}
        ragged = RaggedStates(whole.seqs, whole.token_starts, whole.part_starts, read, whole.is_new, write)
        out = recurrence(self._kernels, LayerStates(in_place["conv"], in_place["recurrent"], ragged))
        if whole.begun.shape[1]:
            self._clear_unused(layer, here, whole.begun[group])
        here[write, :POSITION_NBYTES] = whole.ends.view(torch.uint8).view(-1, POSITION_NBYTES)
        return out

    def _clear_unused(self, layer: int, here: torch.Tensor, block_ids: torch.Tensor) -> None:
        """Write zeros between and behind a layer's tensors in some blocks. ``here``: the layer's bytes in all blocks."""
        starts = [*self._offsets[layer][:-1], here.shape[1]]
        ends = [
            POSITION_NBYTES,
            *(first + one.nbytes for one, first in zip(self._tensors[layer], starts, strict=False)),
        ]
        for first, end in zip(ends, starts, strict=True):
            word = torch.uint8 if first % 8 or end % 8 else torch.int64
            here.view(word)[block_ids, first // word.itemsize : end // word.itemsize] = 0

    def tensors(self, layer: int, states: torch.Tensor) -> list[tuple[StateTensor, torch.Tensor]]:
        """A layer's tensors in ``states`` (views), each ``[num_seqs, *shape]``."""
        return [
            (one, states[:, first : first + one.nbytes].view(getattr(torch, one.dtype)).view(-1, *one.shape))
            for one, first in zip(self._tensors[layer], self._offsets[layer], strict=False)
        ]

    def _place(self, layer: int) -> tuple[int, slice]:
        """A layer's group, among those of states, and its bytes in a block.

        All of these are read and written, so that equal states give equal blocks.
        """
        group, place = self._groups.places[self._first_layer + layer]
        nbytes = self.block_size * self._groups.sizes[group].count * self._itemsize
        return group - self._groups.num_attention, slice(place * nbytes, (place + 1) * nbytes)


@dataclass(frozen=True, slots=True)
class WholeStep:
    """All parts of a step, for kernels that compute them at once. See RaggedStates."""

    starts: npt.NDArray[np.int64]  # [num_seqs] positions of the first tokens
    write: torch.Tensor  # [num_groups, num_parts]
    ends: torch.Tensor  # [num_parts] positions behind the last tokens
    begun: torch.Tensor  # [num_groups, …] those of ``write`` that the step begins
    seqs: torch.Tensor
    token_starts: torch.Tensor
    part_starts: torch.Tensor
    read: torch.Tensor  # [num_groups, num_seqs]
    is_new: torch.Tensor


@dataclass(frozen=True, slots=True)
class StateStep:
    """The states of one step."""

    pool: StatePool
    parts: Sequence[Part]  # in the order of the step's tokens
    whole: WholeStep | None = None  # None: nothing computes it at once

    def compute(self, layer: int, recurrence: Recurrence) -> torch.Tensor:
        """A layer's outputs for all tokens; replaces its states. ``layer``: among the recurrent ones. There must be a ``whole``."""
        assert self.whole is not None, "nothing computes whole steps"
        return self.pool.compute(self.whole, layer, recurrence)


def _require_positions(states: torch.Tensor, starts: npt.NDArray[np.int64]) -> None:
    """``states`` are of sequences that go on at ``starts``, but where this is 0."""
    found = _positions(states).numpy()
    assert (found == starts)[starts > 0].all(), (
        f"states of {found.tolist()} tokens before positions {starts.tolist()}: a token was computed twice, or not"
    )


def _positions(states: torch.Tensor) -> torch.Tensor:
    """``[num_seqs]``, a view."""
    return states[:, :8].view(torch.int64)[:, 0]
