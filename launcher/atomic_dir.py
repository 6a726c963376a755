"""A directory that is made once and is either whole or not there.

Whoever comes first builds it in a temporary directory beside the final place, under a file lock; the bytes are flushed
to disk, a manifest of all files' sizes is written, and one ``rename`` makes it visible. A process killed at any moment
leaves at most a temporary directory, which the next builder removes. A directory whose files do not match its manifest
(a disk that was full, a file removed by hand) is built anew.

Not for content that changes: a built directory is never touched again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

MANIFEST_NAME = ".kvrelay-manifest.json"


def is_complete(directory: Path) -> bool:
    """Whether the manifest is there and every file in it has the size it was built with."""
    try:
        sizes = json.loads((directory / MANIFEST_NAME).read_text())
        return all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError, TypeError):
        return False


Waiting = Callable[[], contextlib.AbstractContextManager[None]]


def build_once(directory: Path, build: Callable[[Path], None], *, waiting: Waiting = contextlib.nullcontext) -> Path:
    """Return ``directory``, built by ``build(temporary directory)`` if it is not complete yet.

    Side effects: parents are made; ``<name>.lock`` stays beside the directory. Waits while another process builds,
    inside ``waiting()``. Raises OSError, and what ``build`` raises; then nothing visible has changed.
    """
    if is_complete(directory):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.with_name(directory.name + ".lock"), waiting):
        if is_complete(directory):  # another process was quicker
            return directory
        prefix = f".{directory.name}.building-"
        for leftover in directory.parent.glob(prefix + "*"):  # of a builder that was killed: we hold the lock
            shutil.rmtree(leftover)
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=directory.parent))
        try:
            temporary.chmod(0o755)  # mkdtemp's 0700 would hide a shared cache from other users
            build(temporary)
            _seal(temporary)
            if directory.exists():  # incomplete, see above
                shutil.rmtree(directory)
            temporary.rename(directory)
            _sync(directory.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return directory


def _seal(directory: Path) -> None:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    for path in files:
        path.chmod(0o644)  # safetensors writes 0600
        _sync(path)
    manifest = directory / MANIFEST_NAME
    manifest.write_text(json.dumps({str(path.relative_to(directory)): path.stat().st_size for path in files}, indent=1))
    _sync(manifest)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(path: Path, waiting: Waiting) -> Iterator[None]:
    """Hold the lock on ``path``. The kernel releases it when the process ends, however it ends."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with waiting():
                fcntl.flock(file, fcntl.LOCK_EX)
        yield
