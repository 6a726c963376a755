"""A whole deployment (gateway, both workers on fake engines) in a process of its own, whose memory can be looked at from outside.

Run as a script it prints its URL, serves until its standard input ends, checks that nothing is left of any request, and exits.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..relay.http_gateway import deployment, write_model

_ROOT = Path(__file__).parents[2]
_END_S = 60.0


@dataclass(frozen=True)
class Served:
    """Where it is."""

    url: str
    port: int
    pid: int
    log: Path


@contextmanager
def served_gateway(directory: Path) -> Iterator[Served]:
    """One up and ready. Raises AssertionError at the end if a request left anything behind, or if it does not end."""
    log = directory / "gateway.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url = process.stdout.readline().decode().strip()
        assert url, log.read_text()
        yield Served(url, int(url.rpartition(":")[2]), process.pid, log)
        process.stdin.close()
        code = process.wait(_END_S)
        assert code == 0, f"it left with {code}: {log.read_text()[-3000:]}"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdin.close()
        process.stdout.close()


async def _serve() -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with deployment(write_model(Path(directory))) as up:
            sys.stdout.write(f"{up.url}\n")
            sys.stdout.flush()
            await asyncio.to_thread(sys.stdin.read)
            await up.settled()


if __name__ == "__main__":
    asyncio.run(_serve())
