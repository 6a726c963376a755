"""How long kvrelay takes to start with the demo model, and what memory its processes hold beyond weights and KV pool.

    .venv/bin/python benchmarks/start_and_memory.py            # about 2 minutes

Start: from running `kvrelay local` until /health/ready says yes, with the model converted and in the page cache. Memory: the
resident set of each process after a load that has touched every block of a small pool, minus the weights (the size of the
safetensors files, which bf16 keeps) and the pool. Pages of libraries that processes share are counted in each of them.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import click
import msgspec
from peers.load import Load, failures
from peers.rounds import new_seed
from peers.servers import ServerSide, kvrelay
from peers.sides import Places
from peers.stop import stop_in_order

from kvrelay.common.errors import KvrelayError
from kvrelay.launcher.bench.environment import environment
from kvrelay.launcher.models import resolve_model

_POOL_MB = 64  # of the demo model about 2,900 tokens: the load goes through all of it several times
_LOADS = (Load(8, requests=32), Load(1, input_len=1500, output_len=16, requests=3))
_ROLES = {"gateway": "gateway", "prefill-worker": "prefill", "decode-worker": "decode"}
_MB = 1e6


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", default="demo", show_default=True, help="Model directory, Hugging Face id, or 'demo'.")
@click.option("--starts", default=5, show_default=True, type=click.IntRange(1), help="How often it is started.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="All values as JSON.")
def main(model: str, starts: int, output: Path | None) -> None:
    """Measure start and memory of kvrelay on this machine."""
    stop_in_order()
    work = Path(tempfile.mkdtemp(prefix="kvrelay-start-"))
    places = Places(resolve_model(model), None, work, work)
    start_s: list[float] = []
    memory: dict[str, float] = {}
    for number in range(starts):
        side = kvrelay("kvrelay", "", places, "--threads", "1", "--kv-memory-mb", str(_POOL_MB))
        before_s = time.monotonic()
        try:
            side.launch()
            side.wait_ready()
            start_s.append(time.monotonic() - before_s)
            print(f"start {number + 1}/{starts}: ready after {start_s[-1]:.1f} s", flush=True)
            if number + 1 == starts:
                memory = _memory_mb(side, sum(file.stat().st_size for file in places.model.glob("*.safetensors")) / _MB)
        finally:
            side.stop()
    print(
        f"\n| figure | measured | to reach |\n| --- | --- | --- |\n| start, median of {starts} | {median(start_s):.1f} s | ≤ 15 s |"
    )
    for role, used_mb in memory.items():
        print(
            f"| memory beyond weights and pool: {role} | {used_mb:.0f} MB | {'≤ 250 MB' if role == 'gateway' else 'printed'} |"
        )
    if output is not None:
        document = {"environment": environment(), "start_s": start_s, "memory_mb": memory}
        output.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))


def _memory_mb(side: ServerSide, weights_mb: float) -> dict[str, float]:
    """By role, after the loads."""
    for load in _LOADS:
        failed = failures(side.measure(load, new_seed()))
        if failed:
            raise KvrelayError(f"{len(failed)} requests failed: {failed[0].error}: {failed[0].error_text}")
    held: dict[str, float] = {}
    for command, used_bytes in side.rss_bytes().items():
        for word, role in _ROLES.items():
            if word in command.split():
                taken_mb = 0.0 if role == "gateway" else weights_mb + _POOL_MB * 2**20 / _MB
                held[role] = used_bytes / _MB - taken_mb
    return held


if __name__ == "__main__":
    try:
        main()
    except KvrelayError as error:
        sys.exit(f"error: {error}")
