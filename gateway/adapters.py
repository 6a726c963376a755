"""The adapters that clients may name: the folders of one directory, which all gateways and workers see.

An adapter has its folder's name. The directory is scanned every two seconds, and only files that have changed are read. An adapter
that cannot be served is logged once and does not disturb the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from kvrelay.common.adapter_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterAbsentError,
    AdapterError,
    AdapterFiles,
    AdapterRef,
    adapter_digest,
    adapter_directory,
    check_adapter_name,
)

logger = logging.getLogger(__name__)

_SCAN_S = 2.0
_LEFT_S = 3600.0  # a temporary folder of this age is left from a gateway that was killed
_ADDING, _REMOVING = ".adding-", ".removing-"  # names of temporary folders; a scan ignores them
_BEFORE = "before"  # in a temporary folder: the adapter that is being replaced, under its name

_Stamp = tuple[tuple[int, int, int], ...]
"""The size, modification time and inode of each file."""


class AdapterRegistry:
    """The adapters in one directory. Use it on the asyncio loop only; it reads files on another thread."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.refs: Mapping[str, AdapterRef] = {}
        """All adapters by name, as they were when last looked at."""
        self._seen: dict[str, tuple[_Stamp, AdapterRef | None]] = {}  # None: the adapter cannot be served
        self._problem = ""  # why the directory cannot be read, as last logged
        self._lock = asyncio.Lock()

    async def watch(self) -> None:
        """Tidy up what killed gateways have left in the directory, then scan it until cancelled."""
        await asyncio.to_thread(_tidy, self.directory, time.time())
        while True:
            await self.scan()
            await asyncio.sleep(_SCAN_S)

    async def scan(self) -> None:
        """Scan the directory once."""
        async with self._lock:
            try:
                seen = await asyncio.to_thread(_look, self.directory, dict(self._seen))
            except OSError as error:  # the adapters found earlier stay known
                if (problem := str(error)) != self._problem:
                    logger.warning("%s, of --adapters, cannot be read: %s", self.directory, problem)
                self._problem = problem
                return
            self._problem = ""
            self.refs = {name: ref for name, (_, ref) in seen.items() if ref is not None}
            self._seen = seen

    async def add(self, name: str, source: Path, *, replaces: bool) -> None:
        """Copy an adapter's files from ``source``, all of them or none. ``replaces``: overwrite an adapter of that name.

        Raises AdapterError if the adapter cannot be served, its name is taken, or the directory cannot be written.
        """
        async with self._lock:  # a scan between removing the old folder and adding the new one would find neither
            await asyncio.to_thread(_add, self.directory, name, source, replaces)
        await self.scan()

    async def remove(self, name: str) -> None:
        """Delete an adapter's folder. Raises AdapterAbsentError if there is none, AdapterError if it cannot be deleted."""
        async with self._lock:
            await asyncio.to_thread(_remove, self.directory, name)
        await self.scan()


def _add(root: Path, name: str, source: Path, replaces: bool) -> None:
    check_adapter_name(name)
    AdapterFiles.read(source)
    target = root / name
    if target.exists() and not replaces:
        raise AdapterError(f"there is an adapter {name!r} already: unload it first, or ask for load_inplace")
    try:
        # A scan never sees a half-written adapter.
        with tempfile.TemporaryDirectory(prefix=_ADDING, dir=root) as directory:
            fresh = Path(directory, "fresh")
            fresh.mkdir()
            for file in (CONFIG_FILE, WEIGHTS_FILE):
                shutil.copyfile(source / file, fresh / file)
            AdapterFiles.read(fresh)
            before = Path(directory, _BEFORE, name)
            before.parent.mkdir()
            try:
                if target.exists():
                    target.rename(before)
                fresh.rename(target)
            finally:
                _put_back(root, Path(directory))
    except OSError as error:
        raise AdapterError(f"{root}, of --adapters, cannot be written: {error}") from error


def _remove(root: Path, name: str) -> None:
    check_adapter_name(name)
    if not (root / name / CONFIG_FILE).is_file():  # anything else there is not ours to delete
        raise AdapterAbsentError(f"there is no adapter {name!r}")
    try:
        with tempfile.TemporaryDirectory(prefix=_REMOVING, dir=root) as directory:
            (root / name).rename(Path(directory, "gone"))
    except FileNotFoundError as error:
        raise AdapterAbsentError(f"there is no adapter {name!r}") from error
    except OSError as error:
        raise AdapterError(f"{root}, of --adapters, cannot be written: {error}") from error


def _put_back(root: Path, folder: Path) -> None:
    """Put back an adapter that was moved away into a temporary folder, and that no other took the place of."""
    for before in (folder / _BEFORE).glob("*"):
        if not (root / before.name).exists():
            before.rename(root / before.name)


def _tidy(directory: Path, now_s: float) -> None:
    """Put back and remove what lies in temporary folders, as far as this process may. Never raises OSError."""
    with contextlib.suppress(OSError):  # a scan tells why the directory cannot be read
        for folder in directory.iterdir():
            if folder.name.startswith(_ADDING):
                # Also if a gateway just works on it: its rename then fails, and the old adapter stays.
                try:
                    _put_back(directory, folder)
                except OSError:
                    continue  # the folder may have the only copy
            if folder.name.startswith((_ADDING, _REMOVING)) and now_s - folder.lstat().st_mtime > _LEFT_S:
                logger.info("removing %s, which a killed gateway has left", folder)
                shutil.rmtree(folder, ignore_errors=True)


def _look(
    directory: Path, before: Mapping[str, tuple[_Stamp, AdapterRef | None]]
) -> dict[str, tuple[_Stamp, AdapterRef | None]]:
    seen: dict[str, tuple[_Stamp, AdapterRef | None]] = {}
    for folder in sorted(path for path in directory.iterdir() if not path.name.startswith(".") and path.is_dir()):
        try:
            stamp = _stamp(folder)
            known = before.get(folder.name)
            if known is None or known[0] != stamp:
                known = stamp, _read(directory, folder.name)
            seen[folder.name] = known
        except OSError:  # the file is being added or removed
            continue
    return seen


def _stamp(folder: Path) -> _Stamp:
    stats = [(folder / name).stat() for name in (CONFIG_FILE, WEIGHTS_FILE)]
    return tuple((stat.st_size, stat.st_mtime_ns, stat.st_ino) for stat in stats)


def _read(directory: Path, name: str) -> AdapterRef | None:
    try:
        folder = adapter_directory(directory, name)
        AdapterFiles.read(folder)
        return AdapterRef(name, adapter_digest(folder))
    except AdapterAbsentError:
        return None
    except AdapterError as error:
        logger.warning("adapter %r is not served: %s", name[:200], error)
        return None
