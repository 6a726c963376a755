"""How long kvrelay takes to start with the demo model, and what memory its processes hold beyond weights and KV pool.

    .venv/bin/python benchmarks/start_and_memory.py            # about 2 minutes

Start: from running `kvrelay local` until /health/ready says yes, with the model converted and in the page cache; with small KV
pools and with those of the default size, in turns, since their memory is taken from the system at the start. Memory: the
resident set of each process after a load that has touched every block of a small pool, minus the weights (the size of the
safetensors files, which bf16 keeps; float32 takes twice as much) and the pool. Pages of libraries that processes share are
counted in each of them.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import click
import msgspec
from peers.load import Load, SideMeter, failures
from peers.rounds import new_seed
from peers.servers import ServerSide, kvrelay
from peers.sides import Places
from peers.stop import stop_in_order

from kvrelay.common.errors import KvrelayError
from kvrelay.launcher.bench.environment import environment
from kvrelay.launcher.bench.records import CpuUse
from kvrelay.launcher.models import resolve_model

_SMALL_MIB = {
    "bfloat16": 64,
    "float32": 128,
}  # of the demo model about 2,900 tokens: the load goes through all of it several times
_DEFAULT_MIB = 1024  # of --kv-memory-mb without a GPU
_LOADS = (Load(8, requests=32), Load(1, input_len=1500, output_len=16, requests=3))
_ROLES = {"gateway": "gateway", "prefill-worker": "prefill", "decode-worker": "decode"}
_MB = 1e6


@dataclass(frozen=True, slots=True)
class Start:
    """One start."""

    pool_mib: int
    ready_s: float
    cpu: CpuUse | None  # the server's, others' and the hypervisor's meanwhile


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", default="demo", show_default=True, help="Model directory, Hugging Face id, or 'demo'.")
@click.option(
    "--dtype",
    type=click.Choice(list(_SMALL_MIB)),
    default="bfloat16",
    show_default=True,
    help="What kvrelay computes in.",
)
@click.option("--starts", default=5, show_default=True, type=click.IntRange(1), help="Starts with each size of pool.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="All values as JSON.")
def main(model: str, dtype: str, starts: int, output: Path | None) -> None:
    """Measure start and memory of kvrelay on this machine."""
    stop_in_order()
    work = Path(tempfile.mkdtemp(prefix="kvrelay-start-"))
    places = Places(resolve_model(model), None, work, work, dtype)
    weights_mb = sum(file.stat().st_size for file in places.model.glob("*.safetensors")) / _MB
    small_mib = _SMALL_MIB[dtype]
    found: list[Start] = []
    memory: dict[str, float] = {}
    warnings: list[str] = []
    for number in range(starts):
        for pool_mib in (small_mib, _DEFAULT_MIB) if number % 2 == 0 else (_DEFAULT_MIB, small_mib):
            side = kvrelay("kvrelay", "", places, "--threads", "1", "--kv-memory-mb", str(pool_mib))
            try:
                found.append(_start(side, pool_mib))
                print(f"start {number + 1}/{starts}: {_words(found[-1])}", flush=True)
                if number + 1 == starts and pool_mib == small_mib:
                    held_mb = (2 if dtype == "float32" else 1) * weights_mb + small_mib * 2**20 / _MB
                    memory, warnings = _memory_mb(side, held_mb)
            finally:
                side.stop()
    print("\n| figure | measured | to reach |\n| --- | --- | --- |")
    for pool_mib in (small_mib, _DEFAULT_MIB):
        ready_s = [start.ready_s for start in found if start.pool_mib == pool_mib]
        print(f"| start, pools of {pool_mib} MiB, {dtype} | {ranged(ready_s)} s | ≤ 15 s |")
    for role, used_mb in memory.items():
        print(
            f"| memory beyond weights and pool: {role} | {used_mb:.0f} MB | {'≤ 250 MB' if role == 'gateway' else 'printed'} |"
        )
    for warning in warnings:
        print(f"doubtful: {warning}")
    if output is not None:
        document = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment": environment(),
            "dtype": dtype,
            "starts": found,
            "memory_mb": memory,
            "warnings": warnings,
        }
        output.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))


def ranged(values: Sequence[float]) -> str:
    """Median, lowest and highest. Pure."""
    return f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def _start(side: ServerSide, pool_mib: int) -> Start:
    """Start ``side`` and wait until it is ready."""
    before_s = time.monotonic()
    meter = SideMeter(side.pids, list)
    side.launch()
    side.wait_ready()
    return Start(pool_mib, time.monotonic() - before_s, meter.stop())


def _words(start: Start) -> str:
    text = f"pools of {start.pool_mib} MiB, ready after {start.ready_s:.1f} s"
    if start.cpu is None:
        return text
    return f"{text} (cores: it {start.cpu.server or 0.0:.2f}, others {start.cpu.others:.2f}, stolen {start.cpu.stolen:.2f})"


def _memory_mb(side: ServerSide, taken_mb: float) -> tuple[dict[str, float], list[str]]:
    """By role, after the loads, beyond the ``taken_mb`` of a worker's weights and pool; and what makes the loads doubtful."""
    warnings: list[str] = []
    for load in _LOADS:
        result = side.measure(load, new_seed())
        warnings += result.warnings
        failed = failures(result)
        if failed:
            raise KvrelayError(f"{len(failed)} requests failed: {failed[0].error}: {failed[0].error_text}")
    held: dict[str, float] = {}
    for command, used_bytes in side.rss_bytes().items():
        for word, role in _ROLES.items():
            if word in command.split():
                held[role] = used_bytes / _MB - (0.0 if role == "gateway" else taken_mb)
    return held, warnings


if __name__ == "__main__":
    try:
        main()
    except KvrelayError as error:
        sys.exit(f"error: {error}")
