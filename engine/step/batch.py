"""A ragged batch: the numbers of one step, built from its rows. Nothing is padded to the longest row but the block table."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.sequence import Sequence

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tokens, packed row behind row. Rows of a single token come first."""

    rows: list[StepRow]
    order: list[int]  # rows[i] is the caller's row order[i]
    token_ids: Ints  # [num_tokens]; 0 for those that a step under way samples
    fed_from: Ints | None  # [num_tokens], which of the tokens that step samples it is, -1 for none; None: all are known
    positions: Ints  # [num_tokens]
    slot_mapping: Ints  # [num_tokens], block_id * block_size + offset
    query_start_loc: Ints  # [num_rows + 1]
    seq_lens: Ints  # [num_rows], this step's tokens included
    block_tables: Ints  # [num_rows, max_blocks], padded with 0
    num_decode_rows: int  # leading rows of a single token
    sampling_rows: list[int]  # indices of rows that sample
    max_query_len: int


def build_batch(rows: Seq[StepRow], block_size: int, under_way: Mapping[Sequence, int] | None = None) -> Batch:
    """Pack ``rows``. Raises ValueError on an empty row, or one with too few tokens or blocks for what it computes.

    ``under_way``: of which sequences the step that runs samples a token, and the place of that token among those it samples.
    """
    order = sorted(range(len(rows)), key=lambda index: rows[index].num_tokens > 1)
    ordered = [rows[index] for index in order]
    starts = np.array([row.sequence.num_computed_tokens + row.num_ahead for row in ordered], dtype=np.int64)
    counts = np.array([row.num_tokens for row in ordered], dtype=np.int64)
    table_lens = np.array([len(row.sequence.block_table) for row in ordered], dtype=np.int64)
    num_tokens = np.array([row.sequence.num_tokens + row.num_ahead for row in ordered], dtype=np.int64)
    seq_lens = starts + counts
    is_wrong = (counts < 1) | (table_lens * block_size < seq_lens) | (num_tokens < seq_lens)
    for index in np.flatnonzero(is_wrong).tolist():
        raise ValueError(
            f"sequence {ordered[index].sequence.key}: {counts[index]} tokens behind {starts[index]} do not fit "
            f"{table_lens[index]} blocks of {block_size}, or its {num_tokens[index]} tokens"
        )
    query_start_loc = np.concatenate(([0], np.cumsum(counts)))
    row_of_token = np.repeat(np.arange(len(ordered)), counts)
    positions = np.arange(query_start_loc[-1]) - query_start_loc[row_of_token] + starts[row_of_token]
    max_blocks = int(-(-seq_lens.max() // block_size))
    block_tables = np.zeros((len(ordered), max_blocks), dtype=np.int64)
    token_ids: list[int] = []
    fed_from = np.full(len(positions), -1, dtype=np.int64) if any(row.num_ahead for row in ordered) else None
    for index, row in enumerate(ordered):
        sequence = row.sequence
        block_ids = sequence.block_ids()[:max_blocks]
        block_tables[index, : len(block_ids)] = block_ids
        if row.num_ahead and fed_from is not None:
            fed_from[len(token_ids)] = _place_of(row, under_way or {})
            token_ids.append(0)
            continue
        token_ids += sequence.token_ids[sequence.num_computed_tokens : sequence.num_computed_tokens + row.num_tokens]
    slot_mapping = block_tables[row_of_token, positions // block_size] * block_size + positions % block_size
    return Batch(
        rows=ordered,
        order=order,
        token_ids=np.array(token_ids, dtype=np.int64),
        fed_from=fed_from,
        positions=positions,
        slot_mapping=slot_mapping,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_tables=block_tables,
        num_decode_rows=int((counts == 1).sum()),
        sampling_rows=[index for index, row in enumerate(ordered) if row.samples],
        max_query_len=int(counts.max()),
    )


def _place_of(row: StepRow, under_way: Mapping[Sequence, int]) -> int:
    """Which of the tokens that the step under way samples is the row's only input token. Raises ValueError if there is none."""
    place = under_way.get(row.sequence)
    if row.num_ahead != 1 or row.num_tokens != 1 or place is None:
        raise ValueError(
            f"sequence {row.sequence.key}: a row of {row.num_tokens} tokens, {row.num_ahead} ahead; only one token can follow "
            "one that the step under way samples"
        )
    return place
