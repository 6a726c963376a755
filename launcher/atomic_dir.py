"""Builds a directory once, so that it is either complete or absent.

The first process builds it in a temporary directory beside the final place, under a file lock. One ``rename`` makes it visible. A
killed process leaves at most a temporary directory, which the next builder removes. A built directory is never changed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def build_once(directory: Path, build: Callable[[Path], None]) -> Path:
    """Return ``directory``; ``build(temporary directory)`` builds it if it is absent. Waits while another process builds.

    Side effects: creates parents; leaves ``<name>.lock`` beside the directory. Raises OSError, and whatever ``build`` raises. After
    an error nothing visible has changed.
    """
    if directory.exists():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(directory.name + ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases the lock at any end of the process
        if directory.exists():  # another process has built it meanwhile
            return directory
        prefix = f".{directory.name}.building-"
        for leftover in directory.parent.glob(prefix + "*"):  # from a killed builder, since we hold the lock
            shutil.rmtree(leftover)
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=directory.parent))
        try:
            build(temporary)
            temporary.chmod(0o755)  # mkdtemp's 0700 would hide a shared cache from other users
            for path in temporary.iterdir():
                if path.is_symlink():
                    continue  # to a file of somebody else's
                path.chmod(0o644)  # safetensors writes 0600
                with path.open("rb") as file:
                    os.fsync(file.fileno())  # a power cut must not leave the name without the bytes
            temporary.rename(directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return directory
