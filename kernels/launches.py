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

from kvrelay.kernels.attention import decode, index_scores, latent, prefill, rotary
from kvrelay.kernels.attention.decode_workspace import DecodeWorkspace
from kvrelay.kernels.attention.prefill_tiles import TileLoads, has_much_shared_memory, tile_loads
from kvrelay.kernels.linear.cases import NAMES, linear_cases
from kvrelay.kernels.recurrent import convolution, delta_rule, state_space
from kvrelay.kernels.recurrent.ragged import DeltaInputs, RaggedStates, SpaceInputs
from kvrelay.kernels.rows import activation, digests, norm
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
# e4m3 is a hardware type from compute capability 8.9 on. Before, Triton refuses it. On gfx942, whose fp8 has another bias, Triton
# emulates it slowly and with spills. Products of fp8 with fp8 have no other targets either.
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
    has_images: bool = False,
    rotary_size: int | None = None,
) -> list[Launch]:
    case = f"{NAMES[dtype]} d{head_dim} {num_q_heads}/{num_kv_heads}"
    case += (
        (" fp8 pool" if fp8 else "")
        + (f" window {window}" if window else "")
        + (f" chunks of {chunk}" if chunk else "")
    )
    case += (" softcap" if softcap else "") + (" sinks" if has_sinks else "") + (" images" if has_images else "")
    case += f" rotating {rotary_size}" if rotary_size else ""
    pool = torch.empty((2, 2, 2, num_kv_heads, 16, head_dim), dtype=torch.float8_e4m3fn if fp8 else dtype)
    scales = torch.empty((2, 2, num_kv_heads)) if fp8 else None
    qkv = torch.empty((4, num_q_heads + 2 * num_kv_heads, head_dim), dtype=dtype)
    q, k, v = qkv.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)  # type: ignore[no-untyped-call]
    out = torch.empty((4, num_q_heads, head_dim), dtype=dtype)
    tables = torch.empty((4, 8), dtype=torch.int32)
    lens = torch.empty((5,), dtype=torch.int32)
    long = torch.empty((4,), dtype=torch.int64)
    table = torch.empty((32, (rotary_size or head_dim) // 2))
    workspace = DecodeWorkspace.allocate(4, num_q_heads, head_dim, 33, "cpu")
    sinks = torch.empty((num_q_heads,), dtype=dtype) if has_sinks else None
    options: dict[str, Any] = {"scale": 0.1, "sliding_window": window, "out": out, "kv_scales": scales}
    options |= {"softcap": softcap, "sinks": sinks, "chunk_size": chunk}

    def call() -> None:
        last_seen = lens[:4] if has_images else None
        prefill.paged_prefill_attention(
            q, pool, 1, tables, lens, lens[:4], max_query_len=4, last_seen=last_seen, **options
        )
        if not has_images:  # single tokens see no later ones
            rotary.rotary_kv_write(q, k, v, table, table, long, pool, 1, long, scales)
            decode.paged_decode_attention(q, pool, 1, tables, lens[:4], workspace=workspace, **options)

    return _record(case, call)


def _latent_launches(num_q_heads: int, dtype: torch.dtype, *, is_picked: bool = False) -> list[Launch]:
    """DeepSeek's sizes. The combine kernel has more numbers per head there. ``is_picked``: over rows that an indexer picks."""
    rank, size = 512, 576
    pool = torch.empty((2, 2, 1, 1, 1, size + 128) if is_picked else (2, 2, 1, 1, 16, size), dtype=dtype)
    q = torch.empty((4, num_q_heads, size), dtype=dtype)
    out = torch.empty((4, num_q_heads, rank), dtype=dtype)
    tables, lens = torch.empty((4, 8), dtype=torch.int32), torch.empty((5,), dtype=torch.int32)
    workspace = DecodeWorkspace.allocate(4, num_q_heads, rank, 33, "cpu")
    options: dict[str, Any] = {"rank": rank, "scale": 0.1, "out": out}

    def call() -> None:
        latent.latent_prefill_attention(q, pool, 1, tables, lens, lens[:4], max_query_len=4, **options)
        latent.latent_decode_attention(q, pool, 1, tables, lens[:4], workspace=workspace, **options)

    found = _record(f"{NAMES[dtype]} latents of 512 + 64, {num_q_heads} heads{', picked' if is_picked else ''}", call)
    return [one for one in found if not (is_picked and one.kernel.startswith("decode_combine"))]


def _index_launches(num_heads: int, dtype: torch.dtype) -> list[Launch]:
    """The indexers of DeepSeek-V3.2 and GLM-5."""
    pool, query = torch.empty((2, 2, 1, 1, 16, 704), dtype=dtype), torch.empty((4, num_heads, 128), dtype=dtype)
    tables, visible = torch.empty((4, 8), dtype=torch.int32), torch.empty((4,), dtype=torch.int32)
    ranks = torch.empty((4, 128), dtype=torch.int64)
    return _record(
        f"{NAMES[dtype]} keys of 128, {num_heads} heads",
        lambda: index_scores.index_scores(query, query[..., 0].float(), pool, 1, tables, visible, ranks),
    )


def _recurrent_launches(dtype: torch.dtype) -> list[Launch]:
    """The recurrent layers of Qwen3-Next, Nemotron-H and Falcon-H1, for single tokens and a prompt."""
    mixed, gates, heads = torch.empty((4, 8192), dtype=dtype), torch.empty((4, 64), dtype=dtype), torch.empty(32)
    inputs = DeltaInputs(mixed, gates[:, :32], gates[:, 32:], heads, heads)
    pool = torch.empty((2, 2**20))
    matrices, kept = pool[:, :524288].view(2, 32, 128, 128), pool.view(dtype)[:, :32768].view(2, 8192, 4)
    int32, int64 = torch.zeros((5,), dtype=torch.int32), torch.zeros((4,), dtype=torch.int64)
    singles = RaggedStates(int32[:4], int32, int32, int64, torch.zeros(4, dtype=torch.bool), int64)
    prompt = RaggedStates(int32[:4], int32[:2], int32[:2], int64[:1], singles.is_new[:1], int64[:1])

    more = torch.empty(64)
    space = SpaceInputs(mixed[:, :6144], gates, more, more, more, (0.0, 1.0))
    spaces = matrices.view(2, 64, 64, 128)

    def call(states: RaggedStates) -> None:
        delta_rule.gated_delta_rule(inputs, matrices, states)
        state_space.state_space(space, spaces, states)

    wide = SpaceInputs(mixed[:, :4608], gates[:, :32], heads, heads, heads, (0.0, 1.0))
    wides = pool.view(2, 32, 128, 256)
    bias = mixed.view(-1)[:8192]
    return [
        *_record(
            f"{NAMES[dtype]} 8192 channels",
            lambda: convolution.causal_convolution(mixed, mixed.view(8192, 4), bias, kept, singles),
        ),
        *_record(f"{NAMES[dtype]} 2 MiB, single tokens", lambda: call(singles)),
        *_record(f"{NAMES[dtype]} 2 MiB, prompts", lambda: call(prompt)),
        *_record(f"{NAMES[dtype]} 4 MiB, single tokens", lambda: state_space.state_space(wide, wides, singles)),
        *_record(f"{NAMES[dtype]} 4 MiB, prompts", lambda: state_space.state_space(wide, wides, prompt)),
    ]


def _capability(target: Target) -> tuple[int, int] | None:
    backend, arch = target
    return divmod(arch, 10) if backend == "cuda" and isinstance(arch, int) else None


def _box_launches(target: Target) -> list[Launch]:
    """Prefill attention over blocks of 64 tokens, whose tiles are loaded as boxes."""
    found: list[Launch] = []
    for head_dim, num_q_heads, num_kv_heads, dtype, has_images in (
        (64, 9, 3, torch.bfloat16, False),
        (128, 32, 8, torch.bfloat16, False),
        (256, 16, 8, torch.bfloat16, False),
        (128, 32, 16, torch.bfloat16, True),
        (256, 8, 4, torch.bfloat16, True),
        (64, 9, 3, torch.float8_e4m3fn, False),
        (128, 32, 8, torch.float8_e4m3fn, False),
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
                last_seen=lens[:4] if has_images else None,
                loads=TileLoads.BOXES,
            )
            case = f"bf16 d{head_dim} {num_q_heads}/{num_kv_heads}{' fp8 pool' if is_fp8 else ''}"
            found += _record(f"{case}{' images' if has_images else ''} boxes", call)
    return found


def launches(target: Target) -> list[Launch]:
    """The representative specialisations for a target: SmolLM2-135M, Llama-3-8B, Gemma 2, Gemma 4, gpt-oss, Llama 4's chunks,
    Gemma 3's images, and the edges of the tile tables.
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
    blocks = torch.empty((2, 2**21), dtype=torch.uint8)
    found = [
        *_record("bf16 4096 add", lambda: norm.add_rms_norm(hidden, hidden, hidden[0], 1e-5)),
        *_record("bf16 32x128", lambda: norm.rms_norm(heads, heads[0, 0], 1e-5)),
        *_record("bf16 2x2048", lambda: activation.silu_mul(hidden)),
        *_record("bf16 2x2048 clamped", lambda: activation.clamped_swiglu(hidden, 1.702, 7.0)),
        *_record(
            "2 MiB", lambda: digests.block_digests(blocks, ids, 2**21, 2**16, torch.empty((4, 32), dtype=torch.int64))
        ),
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
        *_attention_launches(256, 8, 4, bf16, None, has_images=True),
        *_attention_launches(256, 8, 4, bf16, 1024, has_images=True),
        *_attention_launches(128, 32, 16, bf16, None, has_images=True),
        *_attention_launches(128, 32, 16, bf16, 1024, has_images=True),
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
    rotating = _attention_launches(128, 96, 8, bf16, None, rotary_size=64)
    found += [launch for launch in rotating if launch.kernel.startswith("_rotary")]
    found += [*_latent_launches(128, bf16), *_latent_launches(16, bf16), *_latent_launches(128, bf16, is_picked=True)]
    found += [*_index_launches(64, bf16), *_index_launches(32, bf16), *_recurrent_launches(bf16)]
    for case, call in linear_cases():
        # The kernel that adds splits does not depend on the format, only on whether sums have scales.
        has_own_sums = "int8" in case or "4 bits" in case
        found += [one for one in _record(case, call) if has_own_sums or one.kernel != "_add_splits_kernel"]
    return found
