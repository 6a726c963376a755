"""A ragged batch: the arrays of one step, built from its plan and the slots. Only block tables are padded to the longest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrelay.engine.step.plan import PlanRow, StepPlan, TableDelta
from kvrelay.engine.step.slots import Ints, Slots, SlotSequence


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tokens, packed row behind row. Rows of a single token come first."""

    rows: tuple[PlanRow, ...]
    slots: Ints  # [num_rows]
    token_ids: Ints  # [num_tokens]; 0 for fed tokens
    is_fed: (
        npt.NDArray[np.bool_] | None
    )  # [num_rows], rows whose only token is the one that their slot sampled last; None: no row
    positions: Ints  # [num_tokens]
    slot_mapping: Ints  # [num_groups, num_tokens], block_id * block_size + offset
    query_start_loc: Ints  # [num_rows + 1]
    seq_lens: Ints  # [num_rows], this step's tokens included
    max_blocks: int  # of a row
    slot_tables: Ints  # [num_groups, num_slots, …], the block tables of all slots
    table_deltas: tuple[TableDelta, ...]  # changes of the tables since the batch before
    num_decode_rows: int  # number of leading rows with a single token
    sampling_rows: Ints  # [num_sampled] indices of rows that sample
    max_query_len: int
    adapters: Ints | None = None  # [num_rows], slots of adapters, 0 for none; None: no row has one
    # [num_tokens], the last position that each token sees, from its own to its row's last one; None: its own. Tokens of one image
    # may see each other. A row of one token sees its own.
    last_seen: Ints | None = None
    rotary_positions: Ints | None = None  # [axes, num_tokens]; None: ``positions``

    def block_tables(self, group: int = 0) -> Ints:
        """``[num_rows, max_blocks]``, padded with 0: a copy."""
        return self.slot_tables[group, self.slots, : self.max_blocks]


def build_batch(plan: StepPlan, slots: Slots, block_size: int) -> Batch:
    """Pack the rows of ``plan``, which must have been applied to ``slots``.

    Raises ValueError on an empty row, on a row with too few tokens or blocks for its computation, on one with images that the slot
    does not have, and on rows out of order.
    """
    rows = plan.rows
    index = np.array([row.slot for row in rows], dtype=np.int64)
    starts = np.array([row.start for row in rows], dtype=np.int64)
    counts = np.array([row.num_tokens for row in rows], dtype=np.int64)
    is_fed = np.array([row.is_fed for row in rows], dtype=bool)
    known = [len(slots.sequences[row.slot].token_ids) + len(row.draft_tokens) for row in rows]
    num_known = np.array(known, dtype=np.int64)
    seq_lens = starts + counts
    num_blocks = slots.num_blocks[:, index].min(axis=0)
    is_wrong = (counts < 1) | (num_blocks * block_size < seq_lens) | (num_known + is_fed < seq_lens)
    for place in np.flatnonzero(is_wrong).tolist():
        raise ValueError(
            f"sequence {slots.sequences[rows[place].slot].name}: {counts[place]} tokens behind {starts[place]} do not fit "
            f"{num_blocks[place]} blocks of {block_size}, or its {num_known[place] + is_fed[place]} tokens"
        )
    for place in np.flatnonzero(starts < slots.first_told[index]).tolist():
        raise ValueError(
            f"sequence {slots.sequences[rows[place].slot].name}: computes from token {starts[place]} on; its images up to "
            f"{slots.first_told[index[place]]} did not come with it"
        )
    num_decode_rows = int((counts == 1).sum())
    if (counts[:num_decode_rows] > 1).any() or (is_fed & (counts > 1)).any():
        raise ValueError(f"rows of {counts.tolist()} tokens: those of one come first, and only they may be fed")
    query_start_loc = np.concatenate(([0], np.cumsum(counts)))
    row_of_token = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(query_start_loc[-1]) - query_start_loc[row_of_token] + starts[row_of_token]
    token_ids: list[int] = []
    for row in rows:
        if row.is_fed:
            token_ids.append(0)
        elif row.draft_tokens:
            token_ids.append(row.draft_tokens[-1])
        else:
            token_ids += slots.sequences[row.slot].token_ids[row.start : row.start + row.num_tokens]
    block_ids = slots.block_tables[:, index[row_of_token], positions // block_size]
    last_seen = rotary_positions = None
    if (special := np.flatnonzero(slots.is_special[index])).size:
        parts = [
            _Part(
                slots.sequences[index[place]], int(starts[place]), slice(*query_start_loc[place : place + 2].tolist())
            )
            for place in special.tolist()
        ]
        rotary_positions = _rotary_positions(parts, positions)
        last_seen = _last_seen(parts, positions)
    return Batch(
        rows=rows,
        slots=index,
        token_ids=np.array(token_ids, dtype=np.int64),
        is_fed=is_fed if is_fed.any() else None,
        positions=positions,
        slot_mapping=block_ids * block_size + positions % block_size,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        max_blocks=int(-(-seq_lens.max() // block_size)),
        slot_tables=slots.block_tables,
        table_deltas=plan.tables,
        num_decode_rows=num_decode_rows,
        sampling_rows=np.flatnonzero([row.num_samples for row in rows]),
        max_query_len=int(counts.max()),
        adapters=np.array([row.adapter for row in rows]) if any(row.adapter for row in rows) else None,
        last_seen=last_seen,
        rotary_positions=rotary_positions,
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """A row of a sequence with images, or with an offset."""

    sequence: SlotSequence
    start: int  # position of its first token
    tokens: slice  # its tokens in the step

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.start + int(self.tokens.stop) - int(self.tokens.start)


def _rotary_positions(parts: list[_Part], positions: Ints) -> Ints | None:
    """``[axes, num_tokens]``; None if they are all ``positions``."""
    known = [part.sequence.rotary_positions for part in parts]
    if all(one is None and not part.sequence.position_offset for one, part in zip(known, parts, strict=True)):
        return None
    found = np.tile(positions, (max((len(one) for one in known if one is not None), default=1), 1))
    for part, one in zip(parts, known, strict=True):
        found[:, part.tokens] += part.sequence.position_offset
        if one is not None and part.start < one.shape[1]:
            of_part = one[:, part.start : part.end]
            found[:, part.tokens.start : part.tokens.start + of_part.shape[1]] = of_part
    return found


def _last_seen(parts: list[_Part], positions: Ints) -> Ints | None:
    """See Batch; None if no token of an image is computed. Raises ValueError if a row ends inside an image."""
    found: Ints | None = None
    for part in parts:
        images = part.sequence.images
        for span in images.spans if images is not None and images.takes_whole else ():
            first = max(span.start, part.start)
            if first >= min(span.stop, part.end):
                continue
            if span.stop > part.end:
                raise ValueError(
                    f"sequence {part.sequence.name}: a row ends at {part.end}, inside the image at {span.start} to {span.stop}, "
                    "whose tokens see each other"
                )
            found = positions.copy() if found is None else found
            offset = part.tokens.start - part.start
            found[first + offset : span.stop + offset] = span.stop - 1
    return found
