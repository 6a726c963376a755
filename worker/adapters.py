"""A worker's adapters. They load when a request needs one, and stay within a memory budget; the least recently used go first.

Adapters load one at a time, beside steps. Only requests for the loading adapter wait. Adapters in use stay. A request names its
adapter's digest, and the directory is read only then. So changed files count as another adapter.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.common.adapter_files import (
    AdapterAbsentError,
    AdapterError,
    AdapterFiles,
    AdapterRef,
    adapter_directory,
    require_digest,
)
from kvrelay.engine.settings import ModelSettings
from kvrelay.engine.step.interface import AdapterSlots
from kvrelay.wire.messages import FailureCode

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """The directory of adapters, and their memory budget."""

    directory: Path
    max_bytes: int

    @classmethod
    def of(cls, model: ModelSettings) -> AdapterSettings | None:
        """The settings; None if no adapters are served."""
        return None if model.adapters is None else cls(Path(model.adapters), model.adapter_memory_mb * 2**20)


@dataclass(frozen=True, slots=True)
class AdapterRefusal:
    """Why a request does not get its adapter, and when to retry."""

    code: FailureCode
    detail: str
    retry_after_s: float | None = None


Take = Callable[[int | AdapterRefusal], None]
"""Called with the slot, which the request uses until ``release``, or with the refusal. Must not raise."""


@dataclass(slots=True)
class _Loaded:
    slot: int
    nbytes: int
    num_users: int = 0


class AdapterStore:
    """The loaded adapters and their users. Asyncio loop only; files are read on another thread."""

    def __init__(self, slots: AdapterSlots | None, settings: AdapterSettings | None) -> None:
        """``slots``: the engine's. If it or ``settings`` is None, every adapter is refused."""
        self._slots = slots
        self._settings = settings
        self._loaded: dict[str, _Loaded] = {}  # by digest, least recently used first
        self._waiting: dict[AdapterRef, list[Take]] = {}
        self._loading: asyncio.Task[None] | None = None  # running while requests wait

    @property
    def loaded(self) -> list[str]:
        """Digests of the loaded adapters."""
        return list(self._loaded)

    def acquire(self, ref: AdapterRef, take: Take) -> None:
        """Call ``take`` with the adapter's slot: at once if it is loaded, otherwise after loading."""
        if ref.digest in self._loaded:
            take(self._use(ref.digest))
            return
        if self._slots is None or self._settings is None:
            detail = f"adapter {ref.name!r} is asked for, and this worker has no --adapters"
            take(AdapterRefusal(FailureCode.NO_ADAPTER, detail, _RETRY_AFTER_S))
            return
        self._waiting.setdefault(ref, []).append(take)
        if self._loading is None:
            self._loading = asyncio.create_task(self._load_all(self._slots, self._settings))

    def release(self, ref: AdapterRef) -> None:
        """End one use of an adapter."""
        loaded = self._loaded[ref.digest]
        assert loaded.num_users > 0, f"adapter {ref.name} has no user"
        loaded.num_users -= 1

    def debug(self) -> dict[str, Any]:
        """For /debug/kv."""
        return {
            digest: {"slot": one.slot, "bytes": one.nbytes, "users": one.num_users}
            for digest, one in self._loaded.items()
        }

    async def stop(self) -> None:
        """Stop loading."""
        if self._loading is not None:
            self._loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loading

    def _use(self, digest: str) -> int:
        loaded = self._loaded.pop(digest)
        self._loaded[digest] = loaded
        loaded.num_users += 1
        return loaded.slot

    async def _load_all(self, slots: AdapterSlots, settings: AdapterSettings) -> None:
        try:
            while self._waiting:
                ref = next(iter(self._waiting))
                refusal = await self._load(ref, slots, settings)
                for take in self._waiting.pop(ref):
                    take(self._use(ref.digest) if refusal is None else refusal)
        finally:
            self._loading = None

    async def _load(self, ref: AdapterRef, slots: AdapterSlots, settings: AdapterSettings) -> AdapterRefusal | None:
        if ref.digest in self._loaded:  # under another name
            return None
        try:
            files = await asyncio.to_thread(_read, settings.directory, ref)
            nbytes = slots.nbytes(files)
            if nbytes > settings.max_bytes:
                raise AdapterError(
                    f"{files.directory} takes {nbytes / 2**20:.0f} MiB; --adapter-memory-mb is "
                    f"{settings.max_bytes // 2**20}: raise it"
                )
            freed = self._make_room(nbytes, slots, settings)
            if freed is None:
                detail = f"no room for adapter {ref.name!r}: all of the {len(self._loaded)} that are loaded are in use"
                return AdapterRefusal(FailureCode.NO_ADAPTER, detail, _RETRY_AFTER_S)
            taken = {one.slot for one in self._loaded.values()}
            slot = next(slot for slot in range(1, slots.num_slots + 1) if slot not in taken)
            await asyncio.to_thread(_replace, slots, freed, slot, files.directory, ref.digest)
        except AdapterAbsentError as error:
            return AdapterRefusal(FailureCode.NO_ADAPTER, str(error), _RETRY_AFTER_S)
        except AdapterError as error:
            return AdapterRefusal(FailureCode.INVALID, str(error))
        except Exception as error:  # out of memory, for instance: only these requests may fail
            logger.exception("adapter %s could not be loaded", ref.name)
            return AdapterRefusal(
                FailureCode.INTERNAL, f"adapter {ref.name!r} could not be loaded: {type(error).__name__}"
            )
        self._loaded[ref.digest] = _Loaded(slot, nbytes)
        logger.info("adapter %s is loaded, %.1f MiB", ref.name, nbytes / 2**20)
        return None

    def _make_room(self, nbytes: int, slots: AdapterSlots, settings: AdapterSettings) -> list[int] | None:
        """Forget idle adapters until a slot and ``nbytes`` are free. Returns their slots; None if too many are in use."""
        idle = [digest for digest, one in self._loaded.items() if one.num_users == 0]
        used = sum(one.nbytes for one in self._loaded.values())
        in_use = used - sum(self._loaded[digest].nbytes for digest in idle)
        if in_use + nbytes > settings.max_bytes or len(self._loaded) - len(idle) >= slots.num_slots:
            return None
        freed: list[int] = []
        for digest in idle:
            if used + nbytes <= settings.max_bytes and len(self._loaded) < slots.num_slots:
                break
            gone = self._loaded.pop(digest)
            freed.append(gone.slot)
            used -= gone.nbytes
        return freed


def _read(root: Path, ref: AdapterRef) -> AdapterFiles:
    directory = adapter_directory(root, ref.name)
    try:
        return AdapterFiles.read(directory)
    except AdapterError:
        require_digest(directory, ref.digest)
        raise


def _replace(slots: AdapterSlots, freed: Sequence[int], slot: int, directory: Path, digest: str) -> None:
    """Not on the loop: it frees memory, and tells other ranks, which may be behind."""
    for one in freed:
        slots.unload(one)
    slots.load(slot, directory, digest)
