"""Ahead-of-time compilation of every kernel for every target, on a machine without a GPU.

    python -P -m kvrelay.kernels.compile_check [--jobs N] [--json] [--target cuda:90]

compiles what the wrappers launch (see `launches`), reads shared memory, registers, spills and instructions back
from the binaries (see `binaries`), prints a table and exits 1 where a limit is broken. Not a proof of speed,
and not for processes that set TRITON_INTERPRET: there a kernel is not compilable.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvrelay.kernels.attention import decode, index_scores, latent, prefill, rotary, splits
from kvrelay.kernels.binaries import (
    PROCESSORS,
    LoopInstructions,
    amdgcn_resources,
    cubin_resources,
    loop_instructions,
    programs_per_processor,
)
from kvrelay.kernels.launches import Launch, Target, launches
from kvrelay.kernels.linear import few_routes, fp8, group_scaled, grouped, low_rank, vector, weight_only
from kvrelay.kernels.recurrent import convolution, delta_rule, state_space
from kvrelay.kernels.rows import activation, digests, norm
from kvrelay.kernels.sampling import bitmask, penalties, sample_kernels

_KERNELS = {
    kernel.__name__: kernel
    for kernel in (
        activation._swiglu_kernel,
        bitmask._bitmask_kernel,
        digests._digest_kernel,
        convolution._convolution_kernel,
        convolution._keep_inputs_kernel,
        delta_rule._delta_rule_kernel,
        state_space._state_space_kernel,
        splits.decode_combine_kernel,
        decode._decode_split_kernel,
        few_routes._few_down_kernel,
        few_routes._few_gate_up_kernel,
        fp8._fp8_linear_kernel,
        fp8._round_rows_kernel,
        group_scaled._dequantise_groups_kernel,
        group_scaled._group_scaled_linear_kernel,
        grouped._grouped_linear_kernel,
        index_scores._index_scores_kernel,
        latent._latent_prefill_kernel,
        latent._latent_split_kernel,
        low_rank._expand_kernel,
        low_rank._shrink_kernel,
        norm._rms_norm_kernel,
        penalties._penalties_kernel,
        prefill._prefill_attention_kernel,
        rotary._rotary_kv_write_kernel,
        sample_kernels.draw_kernel,
        sample_kernels.group_kernel,
        vector._vector_linear_kernel,
        weight_only._add_splits_kernel,
        weight_only._dequantise_kernel,
        weight_only._weight_only_linear_kernel,
    )
}
_HEADER = """\
| kernel | case | target | threads | registers | shared bytes | spilled | programs | loads in loops | matrix |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""
_WARP_SIZES = {"cuda": 32, "hip": 64}


@dataclass(frozen=True)
class KernelResources:
    """The resources that one program of a compiled kernel uses."""

    case: str
    kernel: str
    target: str
    threads: int
    shared_bytes: int
    registers: int  # per thread
    spill_bytes: int  # local memory per thread; only spills use it
    programs: int  # number that one multiprocessor holds at once
    loops: LoopInstructions | None  # None without PTX

    def broken_limits(self, shared_limit: int, spill_limit: int) -> list[str]:
        """The limits that the kernel exceeds, in words."""
        broken = []
        if self.shared_bytes > shared_limit:
            broken.append(f"{self.shared_bytes} bytes of shared memory, limit {shared_limit}")
        if self.spill_bytes > spill_limit:
            broken.append(f"{self.spill_bytes} bytes spilled")
        return broken


def spill_limit(triton_version: str) -> int:
    """Allowed spill bytes per thread: 0 with the Triton version that tiles were chosen for.

    Triton 3.6 spills up to 88 around loops, none in them.
    """
    return 0 if tuple(map(int, triton_version.split(".")[:2])) >= (3, 9) else 96


def compile_launch(launch: Launch, target: Target) -> KernelResources:
    """Compile one specialisation for one target. The result also stays in Triton's cache."""
    backend, arch = target
    kernel = _KERNELS[launch.kernel]
    source = ASTSource(
        fn=kernel,
        signature=launch.signature,
        constexprs=launch.constexprs,
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in launch.divisible},
    )
    warp_size = _WARP_SIZES[backend]
    compiled = triton.compile(source, target=GPUTarget(backend, arch, warp_size), options=launch.options)
    registers, spill_bytes = (
        cubin_resources(compiled.asm["cubin"]) if backend == "cuda" else amdgcn_resources(compiled.asm["amdgcn"])
    )
    threads, shared_bytes = compiled.metadata.num_warps * warp_size, compiled.metadata.shared
    return KernelResources(
        launch.case,
        launch.kernel,
        f"{backend}:{arch}",
        threads,
        shared_bytes,
        registers,
        spill_bytes,
        programs_per_processor(PROCESSORS[target], threads, registers, shared_bytes),
        loop_instructions(compiled.asm["ptx"]) if backend == "cuda" else None,
    )


def compile_all(jobs: int, targets: Collection[Target] = PROCESSORS) -> list[KernelResources]:
    """Compile every launch for all `targets` in `jobs` processes."""
    work = [(launch, target) for target in targets for launch in launches(target)]
    work.sort(key=lambda item: (item[0].kernel, item[0].case))
    # A forked child would inherit torch's threads in an undefined state.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        return list(pool.map(compile_launch, *zip(*work, strict=True)))


def _table_row(resources: KernelResources, broken: list[str]) -> str:
    loops = resources.loops
    loads = " ".join(f"{width}B:{count}" for width, count in loops.global_loads.items()) if loops else ""
    loads += f" tma:{loops.box_loads}" if loops and loops.box_loads else ""
    matrix = f"{loops.matrix_kind}:{loops.matrix_count}" if loops and loops.matrix_kind else ""
    cells = (
        resources.kernel.removeprefix("_").removesuffix("_kernel"),
        resources.case,
        resources.target,
        resources.threads,
        resources.registers,
        resources.shared_bytes,
        resources.spill_bytes,
        resources.programs,
        loads,
        matrix,
        *broken,
    )
    return f"| {' | '.join(map(str, cells))} |"


def main() -> int:
    """Print the table, or JSON lines. The exit status tells whether all limits hold."""
    parser = argparse.ArgumentParser(prog="python -P -m kvrelay.kernels.compile_check", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    by_name = {f"{backend}:{arch}": (backend, arch) for backend, arch in PROCESSORS}
    parser.add_argument("--target", choices=by_name, help="one target; default: all")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        parser.error("TRITON_INTERPRET is set: interpreted kernels cannot be compiled")
    if not options.json:
        sys.stdout.write(f"{_HEADER}\n")
    failed = False
    targets = [by_name[options.target]] if options.target else list(PROCESSORS)
    for resources in compile_all(options.jobs, targets):
        shared_limit = PROCESSORS[by_name[resources.target]].shared_limit
        broken = resources.broken_limits(shared_limit, spill_limit(triton.__version__))
        failed |= bool(broken)
        line = json.dumps(asdict(resources)) if options.json else _table_row(resources, broken)
        sys.stdout.write(line + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
