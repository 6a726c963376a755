"""A directory that is made once and is either whole or not there.

Whoever comes first builds it in a temporary directory beside the final place, under a file lock; one ``rename`` makes it visible.
A process killed at any moment leaves at most a temporary directory, which the next builder removes. Not for content that changes: a
built directory is never touched again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def build_once(directory: Path, build: Callable[[Path], None]) -> Path:
    """Return ``directory``, built by ``build(temporary directory)`` if it is not there yet. Waits while another process builds.

    Side effects: parents are made; ``<name>.lock`` stays beside the directory. Raises OSError, and what ``build`` raises; then
    nothing visible has changed.
    """
    if directory.exists():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(directory.name + ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it when the process ends, however it ends
        if directory.exists():  # another process was quicker
            return directory
        prefix = f".{directory.name}.building-"
        for leftover in directory.parent.glob(prefix + "*"):  # of a builder that was killed: we hold the lock
            shutil.rmtree(leftover)
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=directory.parent))
        try:
            build(temporary)
            temporary.chmod(0o755)  # mkdtemp's 0700 would hide a shared cache from other users
            for path in temporary.iterdir():
                path.chmod(0o644)  # safetensors writes 0600
                with path.open("rb") as file:
                    os.fsync(file.fileno())  # the name must not outlive a power cut that the bytes do not
            temporary.rename(directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return directory
