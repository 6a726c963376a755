"""Calls of the linear kernels' wrappers with the shapes of well-known models, each with its arguments in words.

`launches` records what they launch. Not for calling: tensors are not initialised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kvrelay.kernels.linear import few_routes, fp8, group_scaled, grouped, low_rank, vector, weight_only

Case = tuple[str, Callable[[], object]]
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

_BF16, _E4M3 = torch.bfloat16, torch.float8_e4m3fn
# Numbers of rows, their type, and splits: every tile but the largest.
_ROWS = ((16, _BF16, 1), (16, torch.float16, 4), (32, _BF16, 1), (64, _BF16, 1))


def linear_cases() -> Iterator[Case]:
    """All calls, format by format."""
    for cases in (_by_channel, _by_group, _one_row, _fp8, _experts, _few_routes, _stored_experts, _adapters):
        yield from cases()


def _of_rows(dtype: torch.dtype, name: str, num_rows: int, num_splits: int) -> str:
    return f"{NAMES[dtype]} {name}, {num_rows} rows" + (f", {num_splits} splits" if num_splits > 1 else "")


def _by_channel() -> Iterator[Case]:
    """Every tile over both formats of weights; the other kernels once."""
    scale = torch.empty((256,))
    for weight_dtype, name in ((torch.int8, "int8"), (_E4M3, "e4m3")):
        weight = torch.empty((256, 4096), dtype=weight_dtype)
        for num_rows, dtype, num_splits in (*_ROWS, (256, _BF16, 1)):
            x = torch.empty((num_rows, 4096), dtype=dtype)
            call = partial(weight_only.weight_only_linear, x, weight, scale, None, num_splits)
            yield _of_rows(dtype, name, num_rows, num_splits), call
        yield f"bf16 {name}", partial(weight_only.dequantise_weight, weight, scale, _BF16)


def _by_group() -> Iterator[Case]:
    """Every tile over 4 bits in groups of 128, as AWQ and GPTQ have them; fp8 in blocks; groups of 32."""
    for dtype, name, group_size, sizes in (
        (torch.uint8, "4 bits", 128, (*_ROWS, (256, _BF16, 1))),
        (_E4M3, "e4m3", 128, ((16, _BF16, 1), (64, _BF16, 1), (256, _BF16, 1))),
        (torch.uint8, "4 bits", 32, ((16, _BF16, 1), (64, _BF16, 1))),
    ):
        is_packed = dtype == torch.uint8
        values = torch.empty((256, 4096 // (1 + is_packed)), dtype=dtype)
        scale = torch.empty((256, 4096 // group_size), dtype=torch.float16 if is_packed else torch.float32)
        zero = torch.empty(scale.shape, dtype=torch.uint8) if is_packed else None
        format_name = f"{name} by {group_size}"
        for num_rows, x_dtype, num_splits in sizes:
            x = torch.empty((num_rows, 4096), dtype=x_dtype)
            call = partial(group_scaled.group_scaled_linear, x, values, scale, zero, group_size, None, num_splits)
            yield _of_rows(x_dtype, format_name, num_rows, num_splits), call
        yield f"bf16 {format_name}", partial(group_scaled.dequantise_groups, values, scale, zero, group_size, _BF16)


def _one_row() -> Iterator[Case]:
    """One row with a matrix of few and of many outputs, for each format."""
    x = torch.empty((1, 4096), dtype=_BF16)
    for num_outs in (1024, 4096, 28672):
        ints, e4m3 = (torch.empty((num_outs, 4096), dtype=dtype) for dtype in (torch.int8, _E4M3))
        words, factors = ints.view(torch.uint8)[:, :2048], torch.empty((num_outs, 32), dtype=_BF16)
        case = f"{{}}, one row, {num_outs} outputs"
        one, full = torch.empty((num_outs,)), torch.empty((num_outs, 4096), dtype=_BF16)
        stored = partial(vector.vector_stored_linear, x)
        yield case.format("bf16"), partial(vector.vector_linear, x, full, None)
        yield case.format("bf16 int8"), partial(vector.vector_rounded_linear, x, ints, one, None)
        yield case.format("bf16 e4m3"), partial(vector.vector_rounded_linear, x, e4m3, one, None)
        for group_size in (128, 32):
            scale = factors.repeat(1, 128 // group_size)
            zero = torch.empty(scale.shape, dtype=torch.uint8)
            call = partial(stored, words, scale, zero, group_size, None)
            yield case.format(f"bf16 4 bits by {group_size}"), call
        yield case.format("bf16 e4m3 by 128"), partial(stored, e4m3, factors.float(), None, 128, None)


def _fp8() -> Iterator[Case]:
    """Every tile over a scale for each output and row, and over blocks of 128 on both sides; rows as each scheme rounds them."""
    x = torch.empty((4, 4096), dtype=_BF16)
    for name, size in (("by channel", 4096), ("by 128", 128)):
        values, scale = torch.empty((256, 4096), dtype=_E4M3), torch.empty((256, 4096 // size))
        for num_rows, dtype, num_splits in (*_ROWS, (2048, _BF16, 1)):
            rows = fp8.Fp8Rows(values.new_empty(num_rows, 4096), scale.new_empty(num_rows, 4096 // size), size, dtype)
            call = partial(fp8.fp8_linear, rows, values, scale, size, None, num_splits)
            yield _of_rows(dtype, name, num_rows, num_splits), call
        yield f"bf16 {name}", partial(fp8.round_rows, x, size, None)
    yield "bf16 with one scale", partial(fp8.round_rows, x, 4096, 0.5)


def _experts() -> Iterator[Case]:
    """Every tile over 16-bit weights, with biases as in gpt-oss; 8-bit formats with the tile for few rows."""
    for num_tokens, dtype, name in (
        (16, _BF16, "bf16"),
        (16, torch.int8, "int8"),
        (16, _E4M3, "e4m3"),
        (512, _BF16, "bf16"),
        (2048, _BF16, "bf16"),
    ):
        x, weight = torch.empty((num_tokens, 2880), dtype=_BF16), torch.empty((32 * 64, 2880), dtype=dtype)
        bias, scale = torch.empty((32 * 64,), dtype=_BF16), None if name == "bf16" else torch.empty((32 * 64,))
        routes = grouped.plan_routes(torch.zeros((num_tokens, 4), dtype=torch.int64), 32)
        factors = torch.empty((num_tokens, 4))
        call = partial(grouped.grouped_linear, x, weight, routes, bias=bias, scale=scale, factors=factors)
        yield f"bf16 {name}, 4 of 32 experts, {num_tokens} rows", call


def _few_routes() -> Iterator[Case]:
    """One token: Qwen3-30B-A3B's sizes in each format, and gpt-oss's activation and biases with half as many experts."""
    num_experts = 16
    for name, dtype, top_k, sizes, gate in (
        ("bf16", _BF16, 8, (2048, 768), few_routes.Gate()),
        ("bf16 int8", torch.int8, 8, (2048, 768), few_routes.Gate()),
        ("bf16 e4m3", _E4M3, 8, (2048, 768), few_routes.Gate()),
        ("bf16", _BF16, 4, (2880, 2880), few_routes.Gate(1.702, 7.0)),
        ("bf16, another activation", _BF16, 2, (4096, 1024), None),
    ):
        hidden, intermediate = sizes
        num_rows = (2 * num_experts * intermediate, num_experts * hidden)
        scales = [None if dtype == _BF16 else torch.empty((num,)) for num in num_rows]
        biases = [torch.empty((num,), dtype=_BF16) if top_k == 4 else None for num in num_rows]
        gate_up = few_routes.ExpertMatrix(torch.empty((num_rows[0], hidden), dtype=dtype), scales[0], biases[0])
        down = few_routes.ExpertMatrix(torch.empty((num_rows[1], intermediate), dtype=dtype), scales[1], biases[1])
        x, rows = torch.empty((1, hidden), dtype=_BF16), torch.empty((top_k, intermediate), dtype=_BF16)
        ids, factors = torch.zeros((1, top_k), dtype=torch.int64), torch.empty((1, top_k))
        case = f"{name}, {top_k} experts of {hidden} x {intermediate}"
        yield case, partial(few_routes.few_gate_up, x, gate_up, ids, num_experts, gate)
        yield case, partial(few_routes.few_down, rows, down, ids, factors, num_experts)


def _stored_experts() -> Iterator[Case]:
    """Every tile over MXFP4 with gpt-oss's sizes and biases; fp8 in blocks of 128, 4 bits with zeros in groups of 128 and of 64."""
    for name, dtype, scale_dtype, num_ins, group_size in (
        ("mxfp4", torch.uint8, torch.uint8, 2880, 32),
        ("e4m3 by 128", _E4M3, torch.float32, 2048, 128),
        ("4 bits by 128", torch.uint8, torch.float16, 2048, 128),
        ("4 bits by 64", torch.uint8, torch.float16, 2048, 64),
    ):
        values = torch.empty((32 * 64, num_ins // (1 + (dtype == torch.uint8))), dtype=dtype)
        scale = torch.empty((32 * 64, num_ins // group_size), dtype=scale_dtype)
        zero = torch.empty(scale.shape, dtype=torch.uint8) if scale_dtype == torch.float16 else None
        bias = torch.empty((32 * 64,), dtype=_BF16) if name == "mxfp4" else None
        for num_tokens in (16, 512, 2048):
            x, factors = torch.empty((num_tokens, num_ins), dtype=_BF16), torch.empty((num_tokens, 4))
            routes = grouped.plan_routes(torch.zeros((num_tokens, 4), dtype=torch.int64), 32)
            call = partial(
                grouped.grouped_stored_linear,
                *(x, values, scale, zero, group_size, routes),
                bias=bias,
                factors=factors,
            )
            yield f"bf16 {name}, 4 of 32 experts, {num_tokens} rows", call


def _adapters() -> Iterator[Case]:
    """Every tiling over q, k and v of Llama-3-8B, and over o, which has as many inputs, as a site of one part."""
    for tiling, name, dtype in (
        (low_rank.FEW_ROWS, "few rows", _BF16),
        (low_rank.MANY_ROWS, "many rows", _BF16),
        (low_rank.FP32_ROWS, "any rows", torch.float32),
    ):
        for widths in ((4096, 1024, 1024), (4096,)):
            table = low_rank.LowRankTable(1, 4096, widths, 256, dtype, torch.device("cpu"))
            x, out = torch.empty((4, 4096), dtype=dtype), torch.empty((4, sum(widths)), dtype=dtype)
            rows = torch.empty((4,), dtype=torch.int64)
            adapted = low_rank.AdaptedRows(tiling, rows, torch.empty((4, 3), dtype=torch.int32))
            case = f"{NAMES[dtype]} {'+'.join(map(str, widths))}, {name}"
            yield case, partial(low_rank.add_low_rank, x, out, table, adapted)
