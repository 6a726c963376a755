"""The kernel launches of the wrappers, recorded from real calls with the shapes of well-known models. Nothing is compiled or run.

So block sizes, warps and specialisations always match the code. Not for compiling; see `compile_check`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from kvrelay.kernels.attention import decode, latent, prefill, rotary
from kvrelay.kernels.attention.prefill_tiles import TileLoads, has_much_shared_memory, tile_loads
from kvrelay.kernels.linear import few_routes, fp8, group_scaled, grouped, low_rank, vector, weight_only
from kvrelay.kernels.rows import activation, norm
from kvrelay.kernels.sampling import bitmask, penalties, sample

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
# e4m3 is a hardware type from compute capability 8.9 on. Before, Triton refuses it. On gfx942, whose fp8 has another bias,
# Triton emulates it
# slowly and with spills. Products of fp8 with fp8 have no other targets either.
_FP8_TARGETS = {("cuda", 90), ("cuda", 100)}
Target = tuple[str, int | str]  # backend and architecture


@dataclass(frozen=True)
class Launch:
    """One kernel specialisation, as the JIT would compile it."""

    case: str  # the wrapper's arguments, in words
    kernel: str
    signature: dict[str, str]
    constexprs: dict[str, Any]
    divisible: tuple[str, ...]  # arguments known to be multiples of 16
    options: dict[str, int]


def _specialise(case: str, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """Apply the JIT's rules: integers equal to 1 are constants, and the compiler knows alignment to 16."""
    given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    divisible: list[str] = []
    for param in kernel.params:
        value = given.pop(param.name)
        specialised = not param.do_not_specialize
        if param.is_constexpr or value is None or (specialised and type(value) is int and value == 1):
            signature[param.name] = "constexpr"
            constexprs[param.name] = value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = _TYPES[value.dtype]
            if not param.do_not_specialize_on_alignment and value.data_ptr() % 16 == 0:
                divisible.append(param.name)
        elif isinstance(value, TensorDescriptor):
            box = ", ".join(map(str, value.block_shape))
            signature[param.name] = f"tensordesc<{_TYPES[value.base.dtype].removeprefix('*')}[{box}]>"
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if specialised and value % 16 == 0:
                divisible.append(param.name)
    return Launch(case, kernel.__name__, signature, constexprs, tuple(divisible), given)


def _record(case: str, call: Callable[[], object]) -> list[Launch]:
    """The launches that `call` would make, without running them."""
    launches: list[Launch] = []

    def run(kernel: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        launches.append(_specialise(case, kernel, args, kwargs))

    with mock.patch.object(JITFunction, "run", run):
        call()
    return launches


def _attention_launches(
    head_dim: int,
    num_q_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    window: int | None,
    *,
    fp8: bool = False,
    softcap: float | None = None,
    has_sinks: bool = False,
    chunk: int | None = None,
) -> list[Launch]:
    case = f"{_NAMES[dtype]} d{head_dim} {num_q_heads}/{num_kv_heads}"
    case += (
        (" fp8 pool" if fp8 else "")
        + (f" window {window}" if window else "")
        + (f" chunks of {chunk}" if chunk else "")
    )
    case += (" softcap" if softcap else "") + (" sinks" if has_sinks else "")
    pool = torch.empty((2, 2, 2, num_kv_heads, 16, head_dim), dtype=torch.float8_e4m3fn if fp8 else dtype)
    scales = torch.empty((2, 2, num_kv_heads)) if fp8 else None
    qkv = torch.empty((4, num_q_heads + 2 * num_kv_heads, head_dim), dtype=dtype)
    q, k, v = qkv.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)  # type: ignore[no-untyped-call]
    out = torch.empty((4, num_q_heads, head_dim), dtype=dtype)
    tables = torch.empty((4, 8), dtype=torch.int32)
    lens = torch.empty((5,), dtype=torch.int32)
    long = torch.empty((4,), dtype=torch.int64)
    table = torch.empty((32, head_dim // 2))
    workspace = decode.DecodeWorkspace.allocate(4, num_q_heads, head_dim, 33, "cpu")
    sinks = torch.empty((num_q_heads,), dtype=dtype) if has_sinks else None
    options: dict[str, Any] = {"scale": 0.1, "sliding_window": window, "out": out, "kv_scales": scales}
    options |= {"softcap": softcap, "sinks": sinks, "chunk_size": chunk}

    def call() -> None:
        rotary.rotary_kv_write(q, k, v, table, table, long, pool, 1, long, scales)
        prefill.paged_prefill_attention(q, pool, 1, tables, lens, lens[:4], max_query_len=4, **options)
        decode.paged_decode_attention(q, pool, 1, tables, lens[:4], workspace=workspace, **options)

    return _record(case, call)


def _latent_launches(num_q_heads: int, dtype: torch.dtype) -> list[Launch]:
    """DeepSeek's sizes. The combine kernel has more numbers per head there."""
    rank, size = 512, 576
    pool, q = torch.empty((2, 2, 1, 1, 16, size), dtype=dtype), torch.empty((4, num_q_heads, size), dtype=dtype)
    out = torch.empty((4, num_q_heads, rank), dtype=dtype)
    tables, lens = torch.empty((4, 8), dtype=torch.int32), torch.empty((5,), dtype=torch.int32)
    workspace = decode.DecodeWorkspace.allocate(4, num_q_heads, rank, 33, "cpu")
    options: dict[str, Any] = {"rank": rank, "scale": 0.1, "out": out}

    def call() -> None:
        latent.latent_prefill_attention(q, pool, 1, tables, lens, lens[:4], max_query_len=4, **options)
        latent.latent_decode_attention(q, pool, 1, tables, lens[:4], workspace=workspace, **options)

    return _record(f"{_NAMES[dtype]} latents of 512 + 64, {num_q_heads} heads", call)


def _capability(target: Target) -> tuple[int, int] | None:
    backend, arch = target
    return divmod(arch, 10) if backend == "cuda" and isinstance(arch, int) else None


def _box_launches(target: Target) -> list[Launch]:
    """Prefill attention over blocks of 64 tokens, whose tiles are loaded as boxes."""
    found: list[Launch] = []
    for head_dim, num_q_heads, num_kv_heads, dtype in (
        (64, 9, 3, torch.bfloat16),
        (128, 32, 8, torch.bfloat16),
        (256, 16, 8, torch.bfloat16),
        (64, 9, 3, torch.float8_e4m3fn),
        (128, 32, 8, torch.float8_e4m3fn),
    ):
        pool = torch.empty((2, 2, 2, num_kv_heads, 64, head_dim), dtype=dtype)
        is_fp8 = dtype == torch.float8_e4m3fn
        if tile_loads(_capability(target), pool, has_window=False) is TileLoads.BOXES:
            q = torch.empty((4, num_q_heads, head_dim), dtype=torch.bfloat16)
            lens = torch.empty((5,), dtype=torch.int32)
            call = partial(
                prefill.paged_prefill_attention,
                *(q, pool, 1, lens.new_empty(4, 8), lens, lens[:4]),
                scale=0.1,
                sliding_window=None,
                max_query_len=4,
                out=q,
                kv_scales=torch.empty((2, 2, num_kv_heads)) if is_fp8 else None,
                loads=TileLoads.BOXES,
            )
            case = f"bf16 d{head_dim} {num_q_heads}/{num_kv_heads}{' fp8 pool' if is_fp8 else ''} boxes"
            found += _record(case, call)
    return found


def _linear_launches() -> list[Launch]:
    """Every tile over both formats of weights; the other kernels once."""
    found: list[Launch] = []
    scale = torch.empty((256,))
    for weight_dtype, name in ((torch.int8, "int8"), (torch.float8_e4m3fn, "e4m3")):
        weight = torch.empty((256, 4096), dtype=weight_dtype)
        for num_tokens, dtype, num_splits in (
            (16, torch.bfloat16, 1),
            (16, torch.float16, 4),
            (32, torch.bfloat16, 1),
            (64, torch.bfloat16, 1),
            (256, torch.bfloat16, 1),
        ):
            x = torch.empty((num_tokens, 4096), dtype=dtype)
            case = f"{_NAMES[dtype]} {name}, {num_tokens} rows" + (f", {num_splits} splits" if num_splits > 1 else "")
            found += _record(case, partial(weight_only.weight_only_linear, x, weight, scale, None, num_splits))
        dequantise = partial(weight_only.dequantise_weight, weight, scale, torch.bfloat16)
        found += _record(f"bf16 {name}", dequantise)
    # The kernel that adds splits does not depend on the format.
    return [launch for launch in found if launch.kernel != "_add_splits_kernel" or "int8" in launch.case]


def _group_scaled_launches() -> list[Launch]:
    """Every tile over 4 bits in groups of 128, as AWQ and GPTQ have them; fp8 in blocks; groups of 32."""
    found: list[Launch] = []
    bf16 = torch.bfloat16
    for dtype, name, group_size, sizes in (
        (
            torch.uint8,
            "4 bits",
            128,
            ((16, bf16, 1), (16, torch.float16, 4), (32, bf16, 1), (64, bf16, 1), (256, bf16, 1)),
        ),
        (torch.float8_e4m3fn, "e4m3", 128, ((16, bf16, 1), (64, bf16, 1), (256, bf16, 1))),
        (torch.uint8, "4 bits", 32, ((16, bf16, 1), (64, bf16, 1))),
    ):
        is_packed = dtype == torch.uint8
        values = torch.empty((256, 4096 // (1 + is_packed)), dtype=dtype)
        scale = torch.empty((256, 4096 // group_size), dtype=torch.float16 if is_packed else torch.float32)
        zero = torch.empty(scale.shape, dtype=torch.uint8) if is_packed else None
        for num_tokens, x_dtype, num_splits in sizes:
            x = torch.empty((num_tokens, 4096), dtype=x_dtype)
            case = f"{_NAMES[x_dtype]} {name} by {group_size}, {num_tokens} rows"
            call = partial(group_scaled.group_scaled_linear, x, values, scale, zero, group_size, None, num_splits)
            found += _record(case + (f", {num_splits} splits" if num_splits > 1 else ""), call)
        dequantise = partial(group_scaled.dequantise_groups, values, scale, zero, group_size, bf16)
        found += _record(f"bf16 {name} by {group_size}", dequantise)
    return found


def _vector_launches() -> list[Launch]:
    """One row with a matrix of few and of many outputs, for each format."""
    found: list[Launch] = []
    bf16 = torch.bfloat16
    x = torch.empty((1, 4096), dtype=bf16)
    for num_outs in (1024, 4096, 28672):
        ints, e4m3 = (torch.empty((num_outs, 4096), dtype=dtype) for dtype in (torch.int8, torch.float8_e4m3fn))
        words, factors = ints.view(torch.uint8)[:, :2048], torch.empty((num_outs, 32), dtype=bf16)
        case = f"{{}}, one row, {num_outs} outputs"
        one, full = torch.empty((num_outs,)), torch.empty((num_outs, 4096), dtype=bf16)
        stored = partial(vector.vector_stored_linear, x)
        found += _record(case.format("bf16"), partial(vector.vector_linear, x, full, None))
        found += _record(case.format("bf16 int8"), partial(vector.vector_rounded_linear, x, ints, one, None))
        found += _record(case.format("bf16 e4m3"), partial(vector.vector_rounded_linear, x, e4m3, one, None))
        for group_size in (128, 32):
            scale = factors.repeat(1, 128 // group_size)
            zero = torch.empty(scale.shape, dtype=torch.uint8)
            call = partial(stored, words, scale, zero, group_size, None)
            found += _record(case.format(f"bf16 4 bits by {group_size}"), call)
        found += _record(case.format("bf16 e4m3 by 128"), partial(stored, e4m3, factors.float(), None, 128, None))
    return found


def _fp8_launches() -> list[Launch]:
    """Every tile over a scale for each output and row, and over blocks of 128 on both sides; rows as each scheme rounds them."""
    found: list[Launch] = []
    bf16 = torch.bfloat16
    for name, size in (("by channel", 4096), ("by 128", 128)):
        values, scale = torch.empty((256, 4096), dtype=torch.float8_e4m3fn), torch.empty((256, 4096 // size))
        for num_rows, dtype, num_splits in (
            (16, bf16, 1),
            (16, torch.float16, 4),
            (32, bf16, 1),
            (64, bf16, 1),
            (2048, bf16, 1),
        ):
            shape = (num_rows, 4096 // size)
            rows = fp8.Fp8Rows(values.new_empty(num_rows, 4096), torch.empty(shape), size, dtype)
            case = f"{_NAMES[dtype]} {name}, {num_rows} rows" + (f", {num_splits} splits" if num_splits > 1 else "")
            found += _record(case, partial(fp8.fp8_linear, rows, values, scale, size, None, num_splits))
        x = torch.empty((4, 4096), dtype=bf16)
        found += _record(f"bf16 {name}", partial(fp8.round_rows, x, size, None))
    found += _record("bf16 with one scale", partial(fp8.round_rows, x, 4096, 0.5))
    return [launch for launch in found if launch.kernel != "_add_splits_kernel"]


def _expert_launches() -> list[Launch]:
    """Every tile over 16-bit weights, with biases as in gpt-oss; 8-bit formats with the tile for few rows."""
    found: list[Launch] = []
    for num_tokens, dtype, name in (
        (16, torch.bfloat16, "bf16"),
        (16, torch.int8, "int8"),
        (16, torch.float8_e4m3fn, "e4m3"),
        (512, torch.bfloat16, "bf16"),
        (2048, torch.bfloat16, "bf16"),
    ):
        x, weight = torch.empty((num_tokens, 2880), dtype=torch.bfloat16), torch.empty((32 * 64, 2880), dtype=dtype)
        bias, scale = torch.empty((32 * 64,), dtype=torch.bfloat16), None if name == "bf16" else torch.empty((32 * 64,))
        routes = grouped.plan_routes(torch.zeros((num_tokens, 4), dtype=torch.int64), 32)
        factors = torch.empty((num_tokens, 4))
        call = partial(grouped.grouped_linear, x, weight, routes, bias=bias, scale=scale, factors=factors)
        found += _record(f"bf16 {name}, 4 of 32 experts, {num_tokens} rows", call)
    return found + _few_route_launches() + _stored_expert_launches()


def _few_route_launches() -> list[Launch]:
    """One token: Qwen3-30B-A3B's sizes in each format, and gpt-oss's activation and biases with half as many experts."""
    found: list[Launch] = []
    bf16, num_experts = torch.bfloat16, 16
    for name, dtype, top_k, sizes, gate in (
        ("bf16", bf16, 8, (2048, 768), few_routes.Gate()),
        ("bf16 int8", torch.int8, 8, (2048, 768), few_routes.Gate()),
        ("bf16 e4m3", torch.float8_e4m3fn, 8, (2048, 768), few_routes.Gate()),
        ("bf16", bf16, 4, (2880, 2880), few_routes.Gate(1.702, 7.0)),
        ("bf16, another activation", bf16, 2, (4096, 1024), None),
    ):
        hidden, intermediate = sizes
        num_rows = (2 * num_experts * intermediate, num_experts * hidden)
        scales = [None if dtype == bf16 else torch.empty((num,)) for num in num_rows]
        biases = [torch.empty((num,), dtype=bf16) if top_k == 4 else None for num in num_rows]
        gate_up = few_routes.ExpertMatrix(torch.empty((num_rows[0], hidden), dtype=dtype), scales[0], biases[0])
        down = few_routes.ExpertMatrix(torch.empty((num_rows[1], intermediate), dtype=dtype), scales[1], biases[1])
        x, rows = torch.empty((1, hidden), dtype=bf16), torch.empty((top_k, intermediate), dtype=bf16)
        ids, factors = torch.zeros((1, top_k), dtype=torch.int64), torch.empty((1, top_k))
        case = f"{name}, {top_k} experts of {hidden} x {intermediate}"
        found += _record(case, partial(few_routes.few_gate_up, x, gate_up, ids, num_experts, gate))
        found += _record(case, partial(few_routes.few_down, rows, down, ids, factors, num_experts))
    return found


def _stored_expert_launches() -> list[Launch]:
    """Every tile over MXFP4 with gpt-oss's sizes and biases; fp8 in blocks of 128, 4 bits with zeros in groups of 128 and of 64."""
    found: list[Launch] = []
    fp8 = torch.float8_e4m3fn
    for name, dtype, scale_dtype, num_ins, group_size in (
        ("mxfp4", torch.uint8, torch.uint8, 2880, 32),
        ("e4m3 by 128", fp8, torch.float32, 2048, 128),
        ("4 bits by 128", torch.uint8, torch.float16, 2048, 128),
        ("4 bits by 64", torch.uint8, torch.float16, 2048, 64),
    ):
        values = torch.empty((32 * 64, num_ins // (1 + (dtype == torch.uint8))), dtype=dtype)
        scale = torch.empty((32 * 64, num_ins // group_size), dtype=scale_dtype)
        zero = torch.empty(scale.shape, dtype=torch.uint8) if scale_dtype == torch.float16 else None
        bias = torch.empty((32 * 64,), dtype=torch.bfloat16) if name == "mxfp4" else None
        for num_tokens in (16, 512, 2048):
            x, factors = torch.empty((num_tokens, num_ins), dtype=torch.bfloat16), torch.empty((num_tokens, 4))
            routes = grouped.plan_routes(torch.zeros((num_tokens, 4), dtype=torch.int64), 32)
            call = partial(
                grouped.grouped_stored_linear,
                *(x, values, scale, zero, group_size, routes),
                bias=bias,
                factors=factors,
            )
            found += _record(f"bf16 {name}, 4 of 32 experts, {num_tokens} rows", call)
    return found


def _adapter_launches() -> list[Launch]:
    """Every tiling over q, k and v of Llama-3-8B, and over o, which has as many inputs, as a site of one part."""
    found: list[Launch] = []
    for tiling, name, dtype in (
        (low_rank.FEW_ROWS, "few rows", torch.bfloat16),
        (low_rank.MANY_ROWS, "many rows", torch.bfloat16),
        (low_rank.FP32_ROWS, "any rows", torch.float32),
    ):
        for widths in ((4096, 1024, 1024), (4096,)):
            table = low_rank.LowRankTable(1, 4096, widths, 256, dtype, torch.device("cpu"))
            x, out = torch.empty((4, 4096), dtype=dtype), torch.empty((4, sum(widths)), dtype=dtype)
            rows = torch.empty((4,), dtype=torch.int64)
            adapted = low_rank.AdaptedRows(tiling, rows, torch.empty((4, 3), dtype=torch.int32))
            case = f"{_NAMES[dtype]} {'+'.join(map(str, widths))}, {name}"
            found += _record(case, partial(low_rank.add_low_rank, x, out, table, adapted))
    return found


def launches(target: Target) -> list[Launch]:
    """The representative specialisations for a target: SmolLM2-135M, Llama-3-8B, Gemma 2, Gemma 4, gpt-oss, Llama 4's chunks, and
    the edges of the tile tables.
    """
    is_roomy = has_much_shared_memory(_capability(target))
    # Wrappers would ask the first two of their device. Batches that combine their splits themselves have the larger kernel.
    with (
        mock.patch.object(prefill, "looks_ahead", return_value=target != ("cuda", 80)),
        mock.patch.object(prefill, "has_much_shared_memory", return_value=is_roomy),
        mock.patch.object(decode, "_FEW_SEQS", 0),
    ):
        found = _all_launches()
        boxes = _box_launches(target)
    return [*(one for one in found if target in _FP8_TARGETS or "*fp8e4nv" not in one.signature.values()), *boxes]


def _all_launches() -> list[Launch]:
    bf16 = torch.bfloat16
    hidden = torch.empty((4, 4096), dtype=bf16)
    heads = torch.empty((4, 32, 128), dtype=bf16)
    rows = torch.empty((4,))
    ids = torch.empty((4,), dtype=torch.int64)
    counts = torch.empty((4,), dtype=torch.int32)
    new = penalties.NewTokens(ids, counts, torch.empty((5,), dtype=torch.int32))
    logits, words = torch.empty((4, 128256)), torch.empty((4, 128256 // 32), dtype=torch.int32)
    found = [
        *_record("bf16 4096 add", lambda: norm.add_rms_norm(hidden, hidden, hidden[0], 1e-5)),
        *_record("bf16 32x128", lambda: norm.rms_norm(heads, heads[0, 0], 1e-5)),
        *_record("bf16 2x2048", lambda: activation.silu_mul(hidden)),
        *_record("bf16 2x2048 clamped", lambda: activation.clamped_swiglu(hidden, 1.702, 7.0)),
        *_record("bf16 128256", lambda: bitmask.apply_bitmask(logits.bfloat16(), ids, words)),
        *_record("128256", lambda: sample.sample(logits, rows, counts, rows, rows, rows)),
        *_record("128256", lambda: penalties.apply_penalties(logits, ids, ids, counts, rows, rows, rows)),
        *_record("128256 new", lambda: penalties.apply_penalties(logits, ids, ids, counts, rows, rows, rows, new)),
    ]
    for launch in (
        *_attention_launches(64, 9, 3, bf16, None),
        *_attention_launches(128, 32, 8, bf16, None),
        *_attention_launches(128, 32, 8, bf16, 4096),
        *_attention_launches(128, 40, 8, bf16, None, chunk=8192),
        *_attention_launches(256, 16, 8, bf16, None),
        *_attention_launches(512, 16, 2, bf16, None),
        *_attention_launches(512, 16, 2, bf16, 4096),
        *_attention_launches(128, 32, 8, bf16, None, fp8=True),
        *_attention_launches(64, 9, 3, bf16, None, fp8=True),
        *_attention_launches(256, 16, 8, bf16, None, fp8=True),
        *_attention_launches(256, 8, 4, bf16, 4096, softcap=50.0),
        *_attention_launches(128, 32, 16, bf16, None, softcap=50.0),
        *_attention_launches(64, 64, 8, bf16, 128, has_sinks=True),
        *_attention_launches(64, 64, 8, bf16, None, has_sinks=True),
        *_attention_launches(64, 9, 3, torch.float32, None),
        *_attention_launches(128, 32, 8, torch.float32, None),
    ):
        # The rotary and the combine kernel do not depend on the window. Without fp8 only large heads need the combine kernel.
        is_representative = launch.case == "bf16 d128 32/8"
        if launch.kernel.startswith("decode_combine"):
            is_representative = launch.case in ("bf16 d128 32/8 fp8 pool", "bf16 d512 16/2")
        if launch.kernel.startswith("_rotary"):
            is_representative |= launch.case == "bf16 d128 32/8 fp8 pool"
        if is_representative or launch.kernel.startswith(("_prefill", "_decode_split")):
            found.append(launch)
    found += [*_latent_launches(128, bf16), *_latent_launches(16, bf16)]
    found += [*_linear_launches(), *_group_scaled_launches(), *_vector_launches(), *_fp8_launches()]
    return [*found, *_expert_launches(), *_adapter_launches()]
