"""Random images in rows of a step: the last position that each token sees."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from kvrelay.engine.step.batch import Batch
from kvrelay.engine.step.slots import Ints


def random_last_seen(query_lens: Seq[int], seq_lens: Seq[int], seed: int = 0, longest: int = 70) -> Ints:
    """``[num_tokens]``, with disjoint images of up to ``longest`` tokens among each row's last ``query_len`` positions.

    Some follow each other at once, and some begin or end their row. Rows of one token see their own position.
    """
    draw, found = random.Random(seed), []
    for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
        position = seq_len - query_len
        while position < seq_len:
            end = min(seq_len, position + draw.randint(1, longest))
            is_image = draw.random() < 0.6
            found += [end - 1] * (end - position) if is_image else range(position, end)
            position = end
    return np.array(found, dtype=np.int64)


def with_images(batch: Batch, seed: int = 0, longest: int = 70) -> Batch:
    """The batch with :func:`random_last_seen`."""
    counts = np.diff(batch.query_start_loc).tolist()
    return replace(batch, last_seen=random_last_seen(counts, batch.seq_lens.tolist(), seed, longest))
