"""A fake engine's adapters. Their files are read and checked, and K/V and tokens depend on their contents."""

from __future__ import annotations

from pathlib import Path

import xxhash

from kvrelay.common.adapter_files import AdapterFiles, require_digest

_NUM_SLOTS = 256
_NUMBER_NBYTES = 2  # like bf16


class FakeAdapters:
    """Implements :class:`kvrelay.engine.step.interface.AdapterSlots`."""

    num_slots = _NUM_SLOTS

    def __init__(self) -> None:
        self._roots: dict[int, bytes] = {}

    def nbytes(self, files: AdapterFiles) -> int:
        """See AdapterSlots."""
        return files.num_parameters * _NUMBER_NBYTES

    def load(self, slot: int, directory: Path, digest: str) -> None:
        """See AdapterSlots."""
        assert slot not in self._roots, f"slot {slot} has an adapter"
        try:
            AdapterFiles.read(directory)
        finally:
            require_digest(directory, digest)
        self._roots[slot] = adapter_root(digest)

    def unload(self, slot: int) -> None:
        """See AdapterSlots."""
        del self._roots[slot]

    def root(self, slot: int) -> bytes:
        """The digest before a sequence's first token. Raises ValueError if the slot has no adapter."""
        if slot and slot not in self._roots:
            raise ValueError(f"a row with the adapter in slot {slot}; there are {sorted(self._roots)}")
        return self._roots[slot] if slot else b""


def adapter_root(digest: str) -> bytes:
    """The digest of an adapter before any token."""
    return xxhash.xxh3_64_digest(digest.encode())
