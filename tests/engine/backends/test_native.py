"""Our C++ kernels: bit-identical to torch where both round alike, and attention against a dense float64 reference."""

from __future__ import annotations

import ctypes
import itertools
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kvrelay.common.kv_geometry import Chunk, Window
from kvrelay.engine.backends.cpu.build import why_no_cpu_kernels
from kvrelay.engine.backends.cpu.linear import NativeLinear
from kvrelay.engine.backends.cpu.low_rank import NativeLowRank
from kvrelay.engine.backends.cpu.native import CpuKernels, compiled, prebuild
from kvrelay.engine.backends.cpu.native.compiled import default_cache_dir
from kvrelay.engine.backends.cpu.native_ops import NativeCpuOps
from kvrelay.engine.backends.cpu.ops import CpuOps
from kvrelay.engine.backends.options import EngineOptions
from kvrelay.engine.config.model import ModelConfig
from kvrelay.engine.config.rope import RopeConfig
from kvrelay.engine.models.low_rank import TokenGroups, TorchLowRank
from kvrelay.engine.models.ops import PLAIN, Scores
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.weights.adapters import LowRank
from tests.engine.backends.test_attention import RAGGED, dense
from tests.engine.conftest import sequence
from tests.engine.led import batch_of, shuffled_batch
from tests.last_seen import with_images


@pytest.fixture(scope="module")
def prebuilt(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The kernels compiled ahead, as for an image, by kind of processor."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    paths = prebuild.prebuild(tmp_path_factory.mktemp("prebuilt"))
    return {path.name.removeprefix("cpu-").rpartition("-")[0]: path for path in paths}


@pytest.fixture(scope="module", params=[None, *compiled.VARIANTS], ids=lambda it: "native" if it is None else it.name)
def kernels(request: pytest.FixtureRequest, prebuilt: dict[str, Path]) -> CpuKernels:
    """The kernels for this processor, and for each kind of processor whose instructions it has."""
    variant: compiled.Variant | None = request.param
    if variant is None:
        return CpuKernels.load(default_cache_dir())
    if not variant.needs <= compiled.processor_flags():
        pytest.skip("this CPU has not all of its instructions")
    return CpuKernels(ctypes.CDLL(str(prebuilt[variant.name])))


def bf16(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).bfloat16()


def config_of(heads: tuple[int, int], head_dim: int, num_layers: int = 2, window: Window | None = None) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=300,
        hidden_size=heads[0] * head_dim,
        intermediate_size=64,
        num_layers=num_layers,
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        has_tied_embeddings=True,
        has_qkv_bias=False,
        has_o_bias=False,
        has_mlp_bias=False,
        has_qk_norm=False,
        sliding_windows=(window,) * num_layers,
        rope=RopeConfig.parse({}, "here"),
        rope_text="",
        dtype="bfloat16",
    )


@pytest.mark.parametrize("rows", [1, 3, 200])
@pytest.mark.parametrize("width", [16, 576, 4096])
def test_norms(kernels: CpuKernels, rows: int, width: int) -> None:
    plain = CpuOps(config_of((2, 2), 32), torch.zeros(1, 2, 2, 2, 16, 32, dtype=torch.bfloat16), 64)
    hidden, residual, weight = bf16(rows, width), bf16(rows, width, seed=1, scale=5), bf16(width, seed=2)
    theirs = residual.clone()
    expected = plain.add_rms_norm(hidden, theirs, weight, 1e-5)
    found = kernels.rms_norm(hidden, residual, weight, 1e-5)
    assert torch.equal(residual, theirs)
    # The sum of squares has another order, so a result may now and then be rounded the other way.
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=0)
    assert (found != expected).float().mean() < 0.01
    alone = kernels.rms_norm(None, residual, weight, 1e-5)
    assert torch.equal(alone, found)


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_silu_mul(kernels: CpuKernels, rows: int) -> None:
    gate_up = torch.cat((bf16(rows, 96, scale=8), torch.full((rows, 32), -200.0).bfloat16()), dim=1)
    gate, up = gate_up.chunk(2, dim=-1)
    expected = F.silu(gate) * up
    found = kernels.silu_mul(gate_up)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-30)
    assert (found != expected).float().mean() < 0.01
    broken = bf16(2, 64)
    broken[0, 3] = float("nan")
    assert kernels.silu_mul(broken).isnan().sum() == 1


@pytest.mark.parametrize("rows", [1, 300])
def test_clamped_swiglu(kernels: CpuKernels, rows: int) -> None:
    gate_up = bf16(rows, 128, scale=4)
    plain = CpuOps(config_of((2, 2), 32), torch.zeros(1, 2, 2, 2, 16, 32, dtype=torch.bfloat16), 64)
    expected = plain.clamped_swiglu(gate_up, 1.702, 7.0)
    torch.testing.assert_close(kernels.clamped_swiglu(gate_up, 1.702, 7.0), expected, rtol=2**-7, atol=1e-30)


@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_experts_are_those_of_each_alone(kernels: CpuKernels, has_bias: bool) -> None:
    """The grouped product equals each expert's own product bit for bit, for many rows and for none."""
    counts, outs, ins = [3, 0, 1, 130, 6], 70, 48
    starts = torch.tensor([0, *itertools.accumulate(counts)])
    hidden, weight = bf16(sum(counts), ins), bf16(len(counts) * outs, ins, seed=1)
    bias = torch.randn(len(counts) * outs, generator=torch.Generator().manual_seed(2)) if has_bias else None
    panels = kernels.pack_weight(weight, len(counts))
    found = kernels.grouped_linear(hidden, panels, bias, starts, outs)
    for expert, (first, last) in enumerate(itertools.pairwise(starts.tolist())):
        own = slice(expert * outs, (expert + 1) * outs)
        alone = kernels.linear(
            hidden[first:last], kernels.pack_weight(weight[own]), None if bias is None else bias[own], outs
        )
        assert torch.equal(found[first:last], alone)


@pytest.mark.parametrize("width", [1, 15, 16, 17, 300, 49_152])
def test_argmax(kernels: CpuKernels, width: int) -> None:
    logits = bf16(9, width, seed=width)  # bf16 has few distinct values, so many are equal
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert kernels.argmax(logits).tolist() == expected
    logits[4] = float("nan")
    assert 0 <= int(kernels.argmax(logits)[4]) < width


def test_argmax_of_logits_that_were_processed(kernels: CpuKernels) -> None:
    """Processed logits are fp32, with differences that bf16 cannot represent."""
    config, pool = config_of((6, 2), 64), torch.zeros(1, 1, 2, 2, 16, 64, dtype=torch.bfloat16)
    logits = torch.full((2, 300), 5.0)
    logits[0, 17] = logits[1, 299] = 5.0001
    assert NativeCpuOps(config, pool, 16, kernels).argmax(logits).tolist() == [17, 299]


@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary"),
    [((9, 3), 64, 1), ((4, 4), 32, 1), ((8, 1), 128, 1), ((14, 2), 64, 1), ((2, 2), 96, 1), ((6, 2), 128, 0.5)],
)
@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_a_step_is_that_of_plain_torch(
    kernels: CpuKernels, heads: tuple[int, int], head_dim: int, rotary: float, block_size: int
) -> None:
    """Rotation and pool are bit-identical, attention is as exact as torch's. Decode rows are mixed with chunks of prompts."""
    config = replace(config_of(heads, head_dim), rope=RopeConfig("default", 10000.0, "{}", rotary))
    batch, num_blocks = shuffled_batch([(300, 1), (0, 1), (0, 70), (17, 1), (100, 20)], block_size)
    pool = bf16(num_blocks, 2, 2, heads[1], block_size, head_dim)
    theirs = pool.clone()
    num_tokens = len(batch.positions)
    qkv = bf16(num_tokens, heads[0] + 2 * heads[1], head_dim, seed=3)
    qkv[1, heads[0]] = float("nan")
    qkv[2, -1] = float("inf")
    query, key, value = qkv.split_with_sizes((heads[0], heads[1], heads[1]), dim=1)
    ours = NativeCpuOps(config, pool, 512, kernels).begin_step(batch)
    plain = CpuOps(config, theirs, 512).begin_step(batch)
    rotated = ours.rotary_kv_write(query, key, value, 1)
    expected = plain.rotary_kv_write(query, key, value, 1)
    assert torch.equal(rotated, expected)
    assert torch.equal(pool, theirs)
    assert not pool.isnan().any()
    found, reference = ours.attention(rotated, 1), plain.attention(expected, 1)
    torch.testing.assert_close(found, reference, rtol=0, atol=3e-2)


@pytest.mark.parametrize("window", [None, 1, 20, 150, 300, Chunk(1), Chunk(20), Chunk(150)])
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 64), ((7, 1), 32), ((2, 2), 256)])
def test_attention_against_the_dense_reference(
    kernels: CpuKernels, heads: tuple[int, int], head_dim: int, window: Window | None
) -> None:
    """Chunks of lengths around the sizes of tiles and chunks, with and without computed tokens before them, and single
    tokens."""
    rows = [
        *((start + count - 1, 1) for start, count in RAGGED),
        *((0, count) for count in (2, 63, 64, 65, 300)),
        *((9, 1), (5, 128), (127, 129), (300, 3), (128, 256)),
    ]
    batch, num_blocks = shuffled_batch(rows, 16)
    pool = bf16(num_blocks, 2, 2, heads[1], 16, head_dim)
    # Memory after a sequence's end may be NaN and must not be read.
    for table, seq_len in zip(batch.block_tables(), batch.seq_lens.tolist(), strict=True):
        pool[table[(seq_len - 1) // 16], :, :, :, (seq_len - 1) % 16 + 1 :] = float("nan")
    query = bf16(len(batch.positions), heads[0], head_dim, seed=5)
    found = NativeCpuOps(config_of(heads, head_dim, window=window), pool, 1024, kernels).begin_step(batch)
    found = found.attention(query, 1)
    for index, table in enumerate(batch.block_tables()):
        context = pool[table, 1].permute(1, 2, 0, 3, 4).flatten(2, 3)
        keys, values = context[:, :, : int(batch.seq_lens[index])]
        tokens = slice(int(batch.query_start_loc[index]), int(batch.query_start_loc[index + 1]))
        expected = dense(query[tokens], keys, values, window)
        # Dot products of bf16 round the weights before the values. Otherwise only the result is rounded.
        rtol, atol = (2**-7, 4e-3) if kernels.has_bf16_dot_products else (2**-8, 1e-4)
        torch.testing.assert_close(found[tokens].double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("window", [None, 20, 100, 300])
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 64), ((7, 1), 32), ((2, 1), 256)])
def test_images_see_themselves(kernels: CpuKernels, heads: tuple[int, int], head_dim: int, window: int | None) -> None:
    """Images longer than tiles, than chunks and than the window."""
    rows = [(300, 1), (0, 1), (0, 300), (5, 128), (127, 129), (300, 3), (100, 250)]
    batch, num_blocks = shuffled_batch(rows, 16)
    batch = with_images(batch, longest=200)
    pool = bf16(num_blocks, 2, 2, heads[1], 16, head_dim)
    for table, seq_len in zip(batch.block_tables(), batch.seq_lens.tolist(), strict=True):
        pool[table[(seq_len - 1) // 16], :, :, :, (seq_len - 1) % 16 + 1 :] = float("nan")
    query = bf16(len(batch.positions), heads[0], head_dim, seed=5)
    config = config_of(heads, head_dim, window=window)
    found = NativeCpuOps(config, pool, 1024, kernels).begin_step(batch).attention(query, 1)
    rtol, atol = (2**-7, 4e-3) if kernels.has_bf16_dot_products else (2**-8, 1e-4)
    for index, table in enumerate(batch.block_tables()):
        keys, values = pool[table, 1].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : int(batch.seq_lens[index])]
        tokens = slice(int(batch.query_start_loc[index]), int(batch.query_start_loc[index + 1]))
        assert batch.last_seen is not None
        expected = dense(query[tokens], keys, values, window, last_seen=batch.last_seen[tokens])
        torch.testing.assert_close(found[tokens].double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("window", [None, 20])
def test_seeing_up_to_the_own_position_changes_no_bit(kernels: CpuKernels, window: int | None) -> None:
    batch, num_blocks = shuffled_batch([(300, 1), (0, 200), (150, 40)], 16)
    pool, query = bf16(num_blocks, 2, 2, 2, 16, 64), bf16(len(batch.positions), 6, 64, seed=5)
    only_windows = replace(config_of((6, 2), 64, window=window), sees_ahead_in_windows_only=True)
    results = [
        NativeCpuOps(config, pool, 512, kernels).begin_step(replace(batch, last_seen=last_seen)).attention(query, 1)
        for config, last_seen in (
            (config_of((6, 2), 64, window=window), None),
            (config_of((6, 2), 64, window=window), batch.positions),
            (only_windows, batch.positions if window else np.maximum(batch.positions, 100)),
        )
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("window", [None, 20, 150, Chunk(70)])
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size"),
    [((6, 2), 64, 16), ((14, 1), 32, 16), ((2, 2), 96, 24), ((16, 1), 128, 1), ((2, 1), 256, 16)],
)
def test_a_token_is_attended_to_in_one_way(
    kernels: CpuKernels, heads: tuple[int, int], head_dim: int, block_size: int, window: Window | None
) -> None:
    """Bit-identical in a whole prompt, in any part of it, or alone, with other sequences in the step."""
    num_tokens = 330
    sizes = [-(-count // block_size) for count in (num_tokens, 7, 90)]
    free = iter(random.Random(1).sample(range(sum(sizes)), sum(sizes)))
    table, begins, far_table = ([next(free) for _ in range(size)] for size in sizes)
    pool = bf16(sum(sizes), 2, 2, heads[1], block_size, head_dim)
    query = bf16(num_tokens, heads[0], head_dim, seed=5, scale=2)
    ops = NativeCpuOps(config_of(heads, head_dim, window=window), pool, 1024, kernels)

    def attended(start: int, end: int) -> torch.Tensor:
        """Tokens start .. end-1 in one step, beside a sequence at its start and a long one."""
        row = StepRow(sequence([0] * end, table), end - start)
        row.sequence.num_computed_tokens = start
        far = sequence([0] * 90, far_table)
        far.num_computed_tokens = 89
        batch = batch_of([row, StepRow(sequence([0] * 7, begins), 7), StepRow(far, 1)], block_size)
        # Rows of a single token come first, so this row is second if it has several tokens.
        place = int(end - start > 1)
        tokens = slice(int(batch.query_start_loc[place]), int(batch.query_start_loc[place + 1]))
        packed = bf16(len(batch.positions), heads[0], head_dim, seed=6)
        packed[tokens] = query[start:end]
        return ops.begin_step(batch).attention(packed, 1)[tokens]

    whole = attended(0, num_tokens)
    cuts = [0, 1, 2, 9, 64, 65, 127, 128, 129, 200, 257, num_tokens]
    assert torch.equal(torch.cat([attended(*part) for part in itertools.pairwise(cuts)]), whole)
    alone = [*range(0, num_tokens, 11), *(at - 1 for at in cuts[1:])]
    assert torch.equal(torch.cat([attended(at, at + 1) for at in alone]), whole[alone])


@pytest.mark.parametrize("window", [None, 20])
def test_sinks_are_keys_without_values(kernels: CpuKernels, window: int | None) -> None:
    config = replace(config_of((6, 2), 64, window=window), has_sinks=True)
    batch, num_blocks = shuffled_batch([(300, 1), (0, 70), (130, 20)], 16)
    pool = bf16(num_blocks, 2, 2, 2, 16, 64)
    query, scores = bf16(len(batch.positions), 6, 64, seed=4), Scores(sinks=torch.linspace(-3, 6, 6).bfloat16())
    found, exact, without = (
        ops.begin_step(batch).attention(given, 1, options)
        for ops, given, options in (
            (NativeCpuOps(config, pool, 512, kernels), query, scores),
            (CpuOps(config, pool.float(), 512), query.float(), scores),
            (NativeCpuOps(config, pool, 512, kernels), query, PLAIN),
        )
    )
    torch.testing.assert_close(found.float(), exact, rtol=0.02, atol=0.01)
    assert (found - without).abs().amax(dim=(0, 2)).min() > 0.001


@pytest.mark.parametrize("head_dim", [64, 96])
def test_a_broken_query_is_broken_alone(kernels: CpuKernels, head_dim: int) -> None:
    """NaN in a query, at any place in a tile, makes only its own result NaN."""
    batch, num_blocks = shuffled_batch([(40, 1), (0, 200), (300, 1)], 16)
    pool = bf16(num_blocks, 2, 2, 1, 16, head_dim)
    query = bf16(len(batch.positions), 2, head_dim)
    step = NativeCpuOps(config_of((2, 1), head_dim), pool, 512, kernels).begin_step(batch)
    expected = step.attention(query, 0)
    broken = [0, 1, 5, 130, 201]
    query[broken, 1, 7] = float("nan")
    found = step.attention(query, 0)
    assert found[broken, 1].isnan().all()
    found[broken, 1] = expected[broken, 1]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("rows", [[(40, 1), (2, 1)], [(0, 200), (40, 7)]])
def test_scores_far_apart_do_not_overflow(kernels: CpuKernels, rows: list[tuple[int, int]]) -> None:
    batch, num_blocks = shuffled_batch(rows, 16)
    pool = bf16(num_blocks, 2, 2, 1, 16, 32, scale=50)
    query = bf16(len(batch.positions), 1, 32, scale=50)
    out = NativeCpuOps(config_of((1, 1), 32), pool, 256, kernels).begin_step(batch).attention(query, 0)
    assert out.isfinite().all()


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(48, 2), (7, 64), (100, 576), (192, 4096), (49, 2050)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products(kernels: CpuKernels, num_outputs: int, num_inputs: int, has_bias: bool) -> None:
    """Numbers of rows around the sizes of tiles. A row's product is bit-identical with any other rows beside it."""
    weight = bf16(num_outputs, num_inputs, scale=num_inputs**-0.5)
    bias = bf16(num_outputs, seed=1) if has_bias else None
    linear = NativeLinear(kernels, weight, bias)
    hidden = bf16(130, num_inputs, seed=2)
    expected = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    alone = torch.cat([linear(row) for row in hidden.split(1)])
    torch.testing.assert_close(alone.double(), expected, rtol=2**-8, atol=1e-4)
    for num_rows in (2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 17, 63, 64, 65, 68, 130):
        assert torch.equal(linear(hidden[:num_rows]), alone[:num_rows])
    assert torch.equal(linear(hidden.repeat(1, 2)[:, :num_inputs]), alone)  # not contiguous


def test_inputs_of_a_weight_come_in_pairs(kernels: CpuKernels) -> None:
    with pytest.raises(ValueError, match="a weight of 3 inputs"):
        kernels.pack_weight(bf16(4, 3))


def test_why_there_are_no_kernels(kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuKernels, "load", lambda _: kernels)

    def why(head_dim: int, asked: str) -> str | None:
        return why_no_cpu_kernels(EngineOptions(Path(), "m", cpu_kernels=asked), config_of((4, 2), head_dim))

    assert why(64, "auto") is why(64, "native") is None
    assert why(64, "torch") == "--cpu-kernels is torch"
    assert str(why(80, "auto")).startswith("they have no code for head_dim 80, 80 of it rotating, with widths")


@pytest.mark.parametrize(
    ("inputs", "outputs", "ranks"), [(96, (40, 8), (1, 16)), (72, (33,), (6,)), (20, (64, 32, 32), (256, 3, 4))]
)
def test_adapters_are_added_as_torch_adds_them(
    kernels: CpuKernels, inputs: int, outputs: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    """Groups of one to six rows, an adapter that lacks a part, and rows without an adapter, which stay
    bit-identical."""
    num_rows, slots = 13, np.array([2, 5, 9])
    groups = TokenGroups(slots, np.array([0, 1, 5, 11]), np.array([12, 0, 3, 4, 7, 1, 2, 5, 6, 8, 9]))
    ours, reference = NativeLowRank(kernels), TorchLowRank()
    for products in (ours, reference):
        products.add_site(inputs, outputs)
        for slot in slots.tolist():
            starts = np.cumsum((0, *outputs))
            parts = [
                LowRank(int(start), bf16(rank, inputs, seed=slot), bf16(size, rank, seed=slot + 1), 0.3 * slot)
                for start, size, rank in zip(starts, outputs, ranks, strict=False)
            ]
            products.put(slot, 0, [None if slot == 5 and index else part for index, part in enumerate(parts)])
        products.begin_step(groups)
    hidden, before = bf16(num_rows, inputs, seed=3, scale=0.1), bf16(num_rows, sum(outputs), seed=4)
    found, expected = before.clone(), before.clone()
    ours.add(0, hidden, found)
    reference.add(0, hidden, expected)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * expected.float().std().item())
    assert torch.equal(found[10:12], before[10:12])
    alone = before[:1].clone()
    ours.begin_step(TokenGroups(np.array([5]), np.array([0, 1]), np.array([0])))
    ours.add(0, hidden[:1], alone)
    assert torch.equal(alone, found[:1])
