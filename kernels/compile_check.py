"""Ahead-of-time compilation of every kernel for every target, on a machine without a GPU.

    python -P -m kvrelay.kernels.compile_check [--jobs N] [--json]

compiles what the wrappers launch (block sizes, warps and specialisations are recorded from real calls, so
they cannot drift from the code), reads shared memory, registers and spills back from the binaries, prints a
table and exits 1 where a limit is broken. Not a proof of speed, and not for processes that set
TRITON_INTERPRET: there a kernel is not compilable.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import struct
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kvrelay.kernels import activation, decode_attention, norm, penalties, prefill_attention, rotary, sampling

_KERNELS = {
    kernel.__name__: kernel
    for kernel in (
        activation._silu_mul_kernel,
        decode_attention._decode_combine_kernel,
        decode_attention._decode_split_kernel,
        norm._rms_norm_kernel,
        penalties._penalties_kernel,
        prefill_attention._prefill_attention_kernel,
        rotary._rotary_kv_write_kernel,
        sampling._sample_kernel,
    )
}
_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_WARP_SIZES = {"cuda": 32, "hip": 64}
# Backend and architecture, with the shared memory one program may use there, in bytes.
TARGETS: dict[tuple[str, int | str], int] = {
    ("cuda", 80): 163 * 1024,
    ("cuda", 90): 227 * 1024,
    ("cuda", 100): 227 * 1024,
    ("hip", "gfx942"): 64 * 1024,
}


@dataclass(frozen=True)
class Launch:
    """One kernel specialisation, as the JIT would compile it."""

    case: str  # what the wrapper was called with
    kernel: str
    signature: dict[str, str]
    constexprs: dict[str, Any]
    divisible: tuple[str, ...]  # arguments known to be multiples of 16
    options: dict[str, int]


@dataclass(frozen=True)
class KernelResources:
    """What one program of a compiled kernel uses."""

    case: str
    kernel: str
    target: str
    shared_bytes: int
    registers: int  # per thread
    spill_bytes: int  # local memory per thread; nothing but spills puts data there

    def broken_limits(self, shared_limit: int) -> list[str]:
        """The limits that do not hold, in words."""
        broken = []
        if self.shared_bytes > shared_limit:
            broken.append(f"{self.shared_bytes} bytes of shared memory, limit {shared_limit}")
        if self.spill_bytes:
            broken.append(f"{self.spill_bytes} bytes spilled")
        return broken


def _specialise(case: str, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """The JIT's rules: integers equal to 1 are constants, alignment to 16 is known to the compiler."""
    given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    divisible: list[str] = []
    for param in kernel.params:
        value = given.pop(param.name)
        specialised = not param.do_not_specialize
        if param.is_constexpr or (specialised and type(value) is int and value == 1):
            signature[param.name] = "constexpr"
            constexprs[param.name] = value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = _TYPES[value.dtype]
            if value.data_ptr() % 16 == 0:
                divisible.append(param.name)
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if specialised and value % 16 == 0:
                divisible.append(param.name)
    return Launch(case, kernel.__name__, signature, constexprs, tuple(divisible), given)


def _record(case: str, call: Callable[[], object]) -> list[Launch]:
    """The launches `call` would make; nothing is run."""
    launches: list[Launch] = []

    def run(kernel: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        launches.append(_specialise(case, kernel, args, kwargs))

    with mock.patch.object(JITFunction, "run", run):
        call()
    return launches


def _attention_launches(
    head_dim: int, num_q_heads: int, num_kv_heads: int, dtype: torch.dtype, window: int | None
) -> list[Launch]:
    case = f"{str(dtype).removeprefix('torch.')} d{head_dim} {num_q_heads}/{num_kv_heads} window {window}"
    pool = torch.empty((2, 2, 2, num_kv_heads, 16, head_dim), dtype=dtype)
    qkv = torch.empty((4, num_q_heads + 2 * num_kv_heads, head_dim), dtype=dtype)
    q, k, v = qkv.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)  # type: ignore[no-untyped-call]
    out = torch.empty((4, num_q_heads, head_dim), dtype=dtype)
    tables = torch.empty((4, 8), dtype=torch.int32)
    lens = torch.empty((5,), dtype=torch.int32)
    long = torch.empty((4,), dtype=torch.int64)
    table = torch.empty((32, head_dim // 2))
    workspace = decode_attention.DecodeWorkspace.allocate(4, num_q_heads, head_dim, 16, "cpu")

    def call() -> None:
        rotary.rotary_kv_write(q, k, v, table, table, long, pool, 1, long)
        prefill_attention.paged_prefill_attention(
            q, pool, 1, tables, lens, lens[:4], scale=0.1, sliding_window=window, max_query_len=4, out=out
        )
        decode_attention.paged_decode_attention(
            q, pool, 1, tables, lens[:4], scale=0.1, sliding_window=window, workspace=workspace, out=out
        )

    return _record(case, call)


def launches() -> list[Launch]:
    """The representative specialisations: SmolLM2-135M, Llama-3-8B, and the edges of the tile tables."""
    bf16 = torch.bfloat16
    hidden = torch.empty((4, 4096), dtype=bf16)
    heads = torch.empty((4, 32, 128), dtype=bf16)
    rows = torch.empty((4,))
    ids = torch.empty((4,), dtype=torch.int64)
    counts = torch.empty((4,), dtype=torch.int32)
    logits = torch.empty((4, 128256))
    found = [
        *_record("bf16 4096 add", lambda: norm.add_rms_norm(hidden, hidden, hidden[0], 1e-5)),
        *_record("bf16 32x128", lambda: norm.rms_norm(heads, heads[0, 0], 1e-5)),
        *_record("bf16 2x2048", lambda: activation.silu_mul(hidden)),
        *_record("128256", lambda: sampling.sample(logits, rows, counts, rows, rows, rows)),
        *_record("128256", lambda: penalties.apply_penalties(logits, ids, ids, counts, rows, rows, rows)),
    ]
    for launch in (
        *_attention_launches(64, 9, 3, bf16, None),
        *_attention_launches(128, 32, 8, bf16, None),
        *_attention_launches(128, 32, 8, bf16, 4096),
        *_attention_launches(256, 16, 8, bf16, None),
        *_attention_launches(64, 9, 3, torch.float32, None),
        *_attention_launches(128, 32, 8, torch.float32, None),
    ):
        # The rotary kernel does not depend on the window, the combine kernel on the dtype hardly at all.
        if launch.kernel.startswith(("_prefill", "_decode_split")) or "bfloat16 d128 32/8 window None" in launch.case:
            found.append(launch)
    return found


def cubin_resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes per thread, from the `.nv.info` section of a single-kernel cubin.

    Attributes (as `cuobjdump -elf` names them): EIATTR_REGCOUNT 0x2f and EIATTR_FRAME_SIZE 0x11, each
    carrying a symbol index and a value.
    """
    section_offset = struct.unpack_from("<Q", cubin, 0x28)[0]
    entry_size, num_sections, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, section_offset + i * entry_size) for i in range(num_sections)]
    names_at = headers[names_index][4]
    found: dict[int, int] = {}
    for name_offset, _, _, _, start, size in headers:
        name_start = names_at + name_offset
        if cubin[name_start : cubin.index(b"\0", name_start)] != b".nv.info":
            continue
        position = start
        while position < start + size:
            form, attribute, length = struct.unpack_from("<BBH", cubin, position)
            position += 4
            # Only the last of the four forms is followed by `length` bytes; the others hold a value in it.
            if form == 4:
                if attribute in (0x2F, 0x11):
                    found[attribute] = struct.unpack_from("<II", cubin, position)[1]
                position += length
    return found[0x2F], found[0x11]


def amdgcn_resources(assembly: str) -> tuple[int, int]:
    """Vector registers and spill bytes per thread, from the kernel's metadata in the assembly text."""
    values = {}
    for line in assembly.splitlines():
        key, _, value = line.strip().removeprefix("- ").partition(":")
        if key in (".vgpr_count", ".vgpr_spill_count", ".private_segment_fixed_size"):
            values[key] = int(value)
    return values[".vgpr_count"], max(4 * values[".vgpr_spill_count"], values[".private_segment_fixed_size"])


def compile_launch(launch: Launch, backend: str, arch: int | str) -> KernelResources:
    """Compile one specialisation for one target; the result is also left in Triton's cache."""
    kernel = _KERNELS[launch.kernel]
    source = ASTSource(
        fn=kernel,
        signature=launch.signature,
        constexprs=launch.constexprs,
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in launch.divisible},
    )
    compiled = triton.compile(source, target=GPUTarget(backend, arch, _WARP_SIZES[backend]), options=launch.options)
    registers, spill_bytes = (
        cubin_resources(compiled.asm["cubin"]) if backend == "cuda" else amdgcn_resources(compiled.asm["amdgcn"])
    )
    return KernelResources(
        launch.case, launch.kernel, f"{backend}:{arch}", compiled.metadata.shared, registers, spill_bytes
    )


def compile_all(jobs: int) -> list[KernelResources]:
    """Compile every launch for every target in `jobs` processes."""
    work = [(launch, backend, arch) for launch in launches() for backend, arch in TARGETS]
    # A forked child would inherit torch's threads half-way.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        return list(pool.map(compile_launch, *zip(*work, strict=True)))


def main() -> int:
    """Print the table, or JSON lines; the exit status says whether every limit holds."""
    parser = argparse.ArgumentParser(prog="python -P -m kvrelay.kernels.compile_check", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        parser.error("TRITON_INTERPRET is set: interpreted kernels cannot be compiled")
    limits = {f"{backend}:{arch}": limit for (backend, arch), limit in TARGETS.items()}
    failed = False
    for resources in compile_all(options.jobs):
        broken = resources.broken_limits(limits[resources.target])
        failed |= bool(broken)
        if options.json:
            line = json.dumps(asdict(resources))
        else:
            line = (
                f"{resources.kernel:28} {resources.case:28} {resources.target:11}"
                f" shared {resources.shared_bytes:7} registers {resources.registers:4}"
                f" spill {resources.spill_bytes:4}  {', '.join(broken)}"
            )
        sys.stdout.write(line + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
