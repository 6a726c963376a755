"""The CPU's paged attention against a dense float64 reference, one sequence at a time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from kvrelay.common.kv_geometry import Chunk, Window
from kvrelay.engine.backends.cpu.attention import AttentionPlan
from kvrelay.engine.backends.cpu.pool_rows import GatherScratch
from kvrelay.engine.config.model import KvSizes
from kvrelay.engine.kv.views import view_group
from kvrelay.engine.models.ops import PLAIN, Scores
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.slots import Ints
from tests.engine.conftest import sequence
from tests.engine.led import batch_of, shuffled_batch
from tests.last_seen import with_images

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def dense(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: Window | None,
    options: Scores = PLAIN,
    last_seen: Ints | None = None,
) -> torch.Tensor:
    """Attention of the last positions. query ``[n, q_heads, d]``, keys and values ``[kv_heads, len, d]``."""
    num_queries, num_q_heads, head_dim = query.shape
    group = num_q_heads // keys.shape[0]
    keys, values = (tensor.double().repeat_interleave(group, dim=0) for tensor in (keys, values))
    scores = query.double().transpose(0, 1) @ keys.mT * (head_dim**-0.5 if options.scale is None else options.scale)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    position, key = torch.arange(keys.shape[1] - num_queries, keys.shape[1])[:, None], torch.arange(keys.shape[1])[None]
    hidden = key > (position if last_seen is None else torch.from_numpy(last_seen)[:, None])
    if isinstance(window, Chunk):
        hidden |= key // window.size < position // window.size
    elif window is not None:
        hidden |= position - key >= window
    scores = scores.masked_fill(hidden, -torch.inf)
    if options.sinks is not None:
        scores = torch.cat((scores, options.sinks.double()[:, None, None].expand(-1, num_queries, 1)), dim=-1)
    return (torch.softmax(scores, dim=-1)[..., : keys.shape[1]] @ values).transpose(0, 1)


def compare(
    rows: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (6, 2),
    window: Window | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    layer: int = 1,
    options: Scores = PLAIN,
    images_seed: int | None = None,
) -> None:
    """Compare one step with ``dense``. ``rows`` are (computed tokens, tokens of this step). ``images_seed``: of random images."""
    head_dim = 16
    generator = torch.Generator().manual_seed(len(rows))
    batch, num_blocks = shuffled_batch(rows, block_size)
    if images_seed is not None:
        batch = with_images(batch, images_seed, longest=150)
    pool = torch.randn(num_blocks, 2, 2, heads[1], block_size, head_dim, generator=generator).to(dtype)
    # Memory after a sequence's end may be NaN and must not be read.
    for table, seq_len in zip(batch.block_tables(), batch.seq_lens.tolist(), strict=True):
        pool[table[(seq_len - 1) // block_size], :, :, :, (seq_len - 1) % block_size + 1 :] = torch.nan
    query = torch.randn(len(batch.positions), heads[0], head_dim, generator=generator).to(dtype)
    out = torch.full_like(query, torch.nan)
    is_plain = options.softcap is None and options.sinks is None
    kv = view_group(pool, KvSizes(heads[1], head_dim, head_dim))
    plan = AttentionPlan(batch, kv, heads[0], window, GatherScratch(dtype), has_plain_scores=is_plain)
    plan.run(query, layer, out, options)
    for index, table in enumerate(batch.block_tables()):
        tokens = slice(int(batch.query_start_loc[index]), int(batch.query_start_loc[index + 1]))
        context = pool[table, layer].permute(1, 2, 0, 3, 4).flatten(2, 3)
        keys, values = context[:, :, : int(batch.seq_lens[index])]
        seen = None if batch.last_seen is None else batch.last_seen[tokens]
        expected = dense(query[tokens], keys, values, window, options, seen)
        torch.testing.assert_close(out[tokens].double(), expected, atol=TOLERANCE[dtype], rtol=0)


RAGGED = [(0, 1), (300, 1), (0, 200), (700, 65), (15, 1), (16, 1), (255, 1), (256, 1), (40, 3), (0, 64), (511, 2)]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("window", [None, 1, 20, 300, Chunk(1), Chunk(20), Chunk(300)])
def test_ragged_batches(window: Window | None, dtype: torch.dtype) -> None:
    compare(RAGGED, window=window, dtype=dtype)


@pytest.mark.parametrize("rows", [RAGGED, [(40, 1)], [(0, 5)]], ids=["ragged", "one token", "one prompt"])
@pytest.mark.parametrize(
    "options",
    [Scores(scale=0.9), Scores(softcap=2.0), Scores(sinks=torch.linspace(-4, 3, 6)), Scores(0.7, 1.5, torch.ones(6))],
    ids=["scale", "softcap", "sinks", "all"],
)
@pytest.mark.parametrize("window", [None, 20])
def test_scores_of_other_models(window: int | None, options: Scores, rows: list[tuple[int, int]]) -> None:
    compare(rows, window=window, options=options)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (9, 3), (8, 2), (8, 1), (14, 2)])
def test_head_groups(heads: tuple[int, int]) -> None:
    compare([(600, 1), (3, 1), (0, 70), (300, 90)], heads=heads)


@pytest.mark.parametrize("block_size", [1, 4, 8, 24, 32, 64, 512])
def test_block_sizes(block_size: int) -> None:
    compare([(600, 1), (3, 1), (0, 70), (300, 90)], block_size=block_size)


# Keys come in chunks of 256 and queries in tiles of 64. These contexts end just before, at and after such borders.
BORDERS = [15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 319, 320, 321, 511, 512, 513]


@pytest.mark.parametrize("window", [None, 64, 65, 256, 257, Chunk(64), Chunk(65), Chunk(256)])
def test_contexts_over_the_borders_of_chunks_and_tiles(window: Window | None) -> None:
    for length in (255, 256, 257, 512, 513):
        compare([(length - 1, 1)], window=window)
    compare([(length - 1, 1) for length in BORDERS], window=window)
    compare([(0, length) for length in BORDERS[::2]], window=window)
    compare([(length, length % 67 + 2) for length in BORDERS[1::2]], window=window)


def test_one_long_context_among_many_short_ones() -> None:
    compare([(2000, 1)] + [(index, 1) for index in range(40)], heads=(8, 2), block_size=32)
    compare([(3, 1), (1500, 200), (0, 1), (0, 5), (700, 1)], heads=(12, 3), window=100)


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed: int) -> None:
    generator = random.Random(seed)
    rows = [
        (generator.choice((0, 1, generator.randrange(700))), generator.choice((1, 1, generator.randrange(1, 150))))
        for _ in range(generator.randrange(1, 12))
    ]
    heads = generator.choice(((2, 2), (6, 2), (4, 1), (16, 2)))
    size = generator.randrange(1, 400)
    window = generator.choice((None, size, Chunk(size)))
    compare(rows, heads=heads, window=window, block_size=generator.choice((4, 16, 32, 48)))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("window", [None, 20, 100, 300, Chunk(20)])
def test_images_see_themselves(window: Window | None, dtype: torch.dtype) -> None:
    compare(RAGGED, window=window, dtype=dtype, images_seed=1)
    compare([(0, 40), (5, 20)], window=window, dtype=dtype, images_seed=3, options=Scores(0.7, 1.5, torch.ones(6)))


@pytest.mark.parametrize("window", [None, 20])
def test_seeing_up_to_the_own_position_changes_no_bit(window: int | None) -> None:
    batch, num_blocks = shuffled_batch(RAGGED, 16)
    pool, query = torch.randn(num_blocks, 1, 2, 2, 16, 16), torch.randn(len(batch.positions), 6, 16)
    kv, results = view_group(pool, KvSizes(2, 16, 16)), []
    for last_seen, sees_ahead in ((None, True), (batch.positions, True), (batch.positions + 1, False)):
        out = torch.empty_like(query)
        of = replace(batch, last_seen=last_seen)
        AttentionPlan(of, kv, 6, window, GatherScratch(torch.float32), sees_ahead=sees_ahead).run(query, 0, out)
        results.append(out)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_long_prompt_does_not_pad_the_others() -> None:
    rows = [(0, 600)] + [(50, 1)] * 40
    steps = []
    for start, count in rows:
        of = sequence([0] * (start + count), [0] * 40)
        of.num_computed_tokens = start
        steps.append(StepRow(of, count))
    batch = batch_of(steps, 16)
    plan = AttentionPlan(
        batch, view_group(torch.zeros(1, 1, 2, 2, 16, 16), KvSizes(2, 16, 16)), 2, None, GatherScratch(torch.float32)
    )
    scores = sum(group.tile * group.chunk * len(piece.tiles) for group in plan._groups for piece in group.pieces)
    assert scores < 2 * (600 * 600 / 2 + 40 * 64)
