"""A worker's memory while it loads a model: its peak compared with the size of weights and pool, for both paths.

    .venv/bin/python benchmarks/loading.py [--model DIR]

Without ``--model`` it uses the demo model, and a random one of 2 GB. Each load runs in a separate process. Anonymous and shared
pages count, above the memory after all imports. Pages of the checkpoint's file are printed separately: the kernel can reclaim them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers

from kvrelay.common.system import return_freed_memory
from kvrelay.engine.backends.options import EngineOptions
from kvrelay.engine.outline import outline_model
from kvrelay.engine.torch_engine import TorchEngine
from kvrelay.engine.transformers_engine import load_transformers_engine
from kvrelay.launcher.models import resolve_model

POOL_MIB = 64
_SAMPLE_S = 0.002
_LIMIT = 1.1


class Peak:
    """The largest sampled memory."""

    def __init__(self) -> None:
        self.own = self.file = 0
        self._is_over = threading.Event()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Sample memory inside the context."""
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(_SAMPLE_S):
            own, file = resident()
            self.own, self.file = max(self.own, own), max(self.file, file)


def resident() -> tuple[int, int]:
    """Bytes in memory: (anonymous and shared, of files)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    anonymous, shared, file = (int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem", "RssFile"))
    return anonymous + shared, file


def load(directory: Path, path: str) -> dict[str, float]:
    """The memory that a load in this process takes."""
    # Load in the files' dtype. On a CPU without bf16 products a worker would load float32.
    options = EngineOptions(
        model_dir=directory, model_id="loaded", device="cpu", dtype="bfloat16", kv_memory_bytes=POOL_MIB * 2**20
    )
    return_freed_memory()  # as a worker does while it loads
    before, _ = resident()
    peak = Peak()
    with peak.measured():
        engine = (TorchEngine.load if path == "native" else load_transformers_engine)(options, lambda *_: None)
    needed = outline_model(directory, path, options.block_size).weights_nbytes + tied_nbytes(directory)
    pool = engine.card.num_blocks * engine.card.block_nbytes
    return {"needed": needed + pool, "peak": peak.own - before, "settled": resident()[0] - before, "file": peak.file}


def tied_nbytes(directory: Path) -> int:
    """Bytes of a tied head. A CPU has it twice: as embedding rows, and packed for products."""
    config = transformers.AutoConfig.from_pretrained(directory)
    return config.vocab_size * config.hidden_size * config.dtype.itemsize if config.tie_word_embeddings else 0


def write_random(directory: Path) -> None:
    """Write a Llama of 2 GB."""
    config = transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=20, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=32000, head_dim=128, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory, max_shard_size="1GB")


def main() -> int:
    """Measure and print. Returns 1 if a peak is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model directory, instead of the two")
    parser.add_argument("--path", choices=("native", "transformers"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.path is not None:
        print(json.dumps(load(arguments.model, arguments.path)))
        return 0
    with tempfile.TemporaryDirectory(prefix="kvrelay-loading-") as temporary:
        models = {str(arguments.model): arguments.model}
        if arguments.model is None:
            write_random(Path(temporary))
            models = {"demo": resolve_model("demo"), "random, 2 GB": Path(temporary)}
        rows = [(name, path, measure(directory, path)) for name, directory in models.items() for path in PATHS]
    print(
        f"{'model':<14} {'path':<13} {'weights+pool':>13} {'peak':>9} {'':>6} {'settled':>9} {'file pages':>11}   (MiB)"
    )
    for name, path, found in rows:
        sizes = {key: value / 2**20 for key, value in found.items()}
        ratio = found["peak"] / found["needed"]
        print(
            f"{name:<14} {path:<13} {sizes['needed']:>13.0f} {sizes['peak']:>9.0f} {ratio:>5.2f}x {sizes['settled']:>9.0f} "
            f"{sizes['file']:>11.0f}"
        )
    return int(any(found["peak"] > _LIMIT * found["needed"] for _, _, found in rows))


PATHS = ("native", "transformers")


def measure(directory: Path, path: str) -> dict[str, float]:
    """Run ``load`` in a separate process."""
    command = [sys.executable, "-P", __file__, "--model", str(directory), "--path", path]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
