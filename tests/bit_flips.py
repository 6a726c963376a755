"""Flips a bit in a running process's memory through ``/proc``, as a memory fault would.

The place is found by its bytes, such as those of a model's weight vector. Works on Linux, for processes that a test may
trace, such as its children.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

_WRITABLE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw.p .*? \d+\s*(.*)")
_CHUNK_NBYTES = 1 << 24


def flip_bit(pid: int, content: bytes, bit: int) -> int:
    """Flip ``bit`` of every writable copy of ``content`` in the process. Returns the number of copies."""
    num_flipped = 0
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            area = _WRITABLE.fullmatch(line)
            if area is None or area[3].startswith("[v"):  # pages of the kernel
                continue
            first, end = int(area[1], 16), int(area[2], 16)
            for place in _places(memory, first, end, content):
                memory.seek(place + bit // 8)
                byte = memory.read(1)[0]
                memory.seek(place + bit // 8)
                memory.write(bytes([byte ^ 1 << bit % 8]))
                num_flipped += 1
    return num_flipped


def _places(memory: io.FileIO, first: int, end: int, content: bytes) -> list[int]:
    found: list[int] = []
    at, before = first, b""
    while at < end:
        memory.seek(at)
        try:
            chunk = memory.read(min(_CHUNK_NBYTES, end - at))
        except OSError:  # nothing is mapped there
            chunk = b""
        if not chunk:
            at, before = at + _CHUNK_NBYTES, b""
            continue
        text, start = before + chunk, at - len(before)
        place = text.find(content)
        while place >= 0:
            found.append(start + place)
            place = text.find(content, place + 1)
        before, at = text[-(len(content) - 1) :], at + len(chunk)
    return found
