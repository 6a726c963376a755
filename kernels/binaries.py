"""What a compiled kernel uses, read from its binary and its PTX: resources, instructions, occupancy.

Without a GPU these tell most of what determines a kernel's speed: the width of its loads, whether it uses tensor cores, whether
registers spill, and how many programs a multiprocessor holds at once. This is no measurement, and does not compile; see
`compile_check`.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from dataclasses import dataclass

_ALLOCATED_REGISTERS = 8  # granularity of allocation, per thread
_LABEL = re.compile(r"^(\$L\w+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$L\w+);")
_LOAD = re.compile(r"\bld\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[bsuf](\d+)\s")
_ASYNC_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\s*\[[^\]]*\],\s*\[[^\]]*\],\s*(0x[0-9a-f]+|\d+)")
_BOX_LOAD = re.compile(r"\bcp\.async\.bulk\.tensor\.\dd\.shared::(?:cluster|cta)\.global\b")
_SHARED_BYTE = re.compile(r"\bld\.shared(?:\.[\w:]+)*?\.[bsu]8\s")
# Newest first: a kernel for Blackwell may contain both.
_MATRIX = {"tcgen05": "tcgen05.mma", "wgmma": "wgmma.mma_async", "mma": "mma.sync"}


@dataclass(frozen=True)
class Processor:
    """The resources that programs on one multiprocessor (compute unit) share."""

    shared_limit: int  # shared memory that one program may use
    shared_bytes: int  # total shared memory
    reserved_bytes: int  # shared memory that each program takes in addition
    threads: int
    registers: int  # of 32 bits
    max_programs: int


PROCESSORS: dict[tuple[str, int | str], Processor] = {
    ("cuda", 80): Processor(163 * 1024, 164 * 1024, 1024, 2048, 65536, 32),
    ("cuda", 90): Processor(227 * 1024, 228 * 1024, 1024, 2048, 65536, 32),
    ("cuda", 100): Processor(227 * 1024, 228 * 1024, 1024, 2048, 65536, 32),
    ("hip", "gfx942"): Processor(64 * 1024, 64 * 1024, 0, 2048, 131072, 32),
}


def programs_per_processor(processor: Processor, threads: int, registers: int, shared_bytes: int) -> int:
    """The number of programs that one multiprocessor holds at once, limited by threads, registers and shared memory."""
    allocated = -(-registers // _ALLOCATED_REGISTERS) * _ALLOCATED_REGISTERS
    return min(
        processor.max_programs,
        processor.threads // threads,
        processor.registers // (allocated * threads),
        processor.shared_bytes // max(1, shared_bytes + processor.reserved_bytes),
    )


@dataclass(frozen=True)
class LoopInstructions:
    """Instructions inside a kernel's loops, counted in the text: an unrolled instruction counts for each copy."""

    global_loads: dict[int, int]  # number by width in bytes; plain loads and copies to shared memory
    box_loads: int  # copies of whole boxes to shared memory (TMA)
    shared_byte_loads: int  # loads of single bytes from shared memory
    matrix_kind: str | None  # mma (Ampere), wgmma (Hopper), tcgen05 (Blackwell)
    matrix_count: int


def loop_instructions(ptx: str) -> LoopInstructions:
    """Count the instructions between a label and a later branch back to it."""
    lines = ptx.splitlines()
    label_at = {match[1]: number for number, line in enumerate(lines) if (match := _LABEL.match(line.strip()))}
    looping: set[int] = set()
    for number, line in enumerate(lines):
        if (match := _BRANCH.search(line)) and label_at[match[1]] <= number:
            looping.update(range(label_at[match[1]], number))
    loads: Counter[int] = Counter()
    matrix: Counter[str] = Counter()
    shared_byte_loads = box_loads = 0
    for number in looping:
        line = lines[number]
        if match := _LOAD.search(line):
            loads[int(match[1] or 1) * int(match[2]) // 8] += 1
        elif match := _ASYNC_COPY.search(line):
            loads[int(match[1], 0)] += 1
        box_loads += bool(_BOX_LOAD.search(line))
        shared_byte_loads += bool(_SHARED_BYTE.search(line))
        matrix.update(kind for kind, instruction in _MATRIX.items() if instruction in line)
    kind = next((kind for kind in _MATRIX if matrix[kind]), None)
    matrix_count = matrix[kind] if kind else 0
    return LoopInstructions(dict(sorted(loads.items())), box_loads, shared_byte_loads, kind, matrix_count)


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
            # Only the last of the four forms has `length` bytes after it; the others store a value in that field.
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
