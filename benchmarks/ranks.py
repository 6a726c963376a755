"""Costs and savings of ranks on the cores of one CPU: a rank's memory, the bytes that it reads of the checkpoint, and step times.

    .venv/bin/python benchmarks/ranks.py [--ranks 1,2,4]

It uses a random Llama in bf16, 0.6 GB. All ranks together have as many threads as the machine has cores, so the hardware is the
same each time, and the difference is the cost of ranks. Run it on an idle machine.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import click
import psutil
import torch
import transformers

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.config.cut import Cut
from kvrelay.engine.config.model import load_config
from kvrelay.engine.factory import load_engine
from kvrelay.engine.settings import FakeSettings, KvSettings, ModelSettings
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.leader import Leader
from kvrelay.engine.step.sequence import Sequence
from kvrelay.engine.weights import checkpoint
from kvrelay.engine.weights.reader import CheckpointReader

T = TypeVar("T")

_CONTEXT, _PROMPT = 128, 512  # tokens
_NUM_STEPS = 30
_BLOCK_SIZE = 16
_KV = KvSettings(num_blocks=512, block_size=_BLOCK_SIZE)


def write_random(directory: Path) -> None:
    """Write a Llama that can be cut for two and four ranks."""
    config = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=4,
        vocab_size=32000, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)


def read_nbytes(directory: Path, num_ranks: int) -> int:
    """The bytes that the last rank reads of the checkpoint."""
    readers: list[CheckpointReader] = []

    class Kept(CheckpointReader):
        def __enter__(self) -> Any:
            readers.append(self)
            return super().__enter__()

    with mock.patch.object(checkpoint, "CheckpointReader", Kept):
        cut = Cut(num_ranks - 1, num_ranks)
        checkpoint.load_weights(
            directory, load_config(directory), torch.bfloat16, torch.device("cpu"), lambda *_: None, cut=cut
        )
    return readers[0].num_bytes_read


def elsewhere(function: Callable[..., T], *arguments: object) -> T:
    """Its result, from a process that ends: what it takes is not counted as a rank's memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


class Steps:
    """Steps of one engine over unchanged sequences: each step computes the same."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    def decode_s(self, num_seqs: int) -> float:
        """Seconds for one token of each sequence, after a short context."""
        num_blocks = -(-(_CONTEXT + 1) // _BLOCK_SIZE)
        rows = [_sequence(f"d{place}", _CONTEXT + 1, place * num_blocks) for place in range(num_seqs)]
        for row in rows:
            self._leader.step([StepRow(row, _CONTEXT + 1)])
            row.num_computed_tokens = _CONTEXT
        return self._median_s([StepRow(row, 1) for row in rows], _NUM_STEPS)

    def prefill_s(self) -> float:
        """Seconds for one prompt."""
        return self._median_s([StepRow(_sequence("p", _PROMPT, 0), _PROMPT)], 5)

    def _median_s(self, rows: list[StepRow], num_steps: int) -> float:
        times = []
        for _ in range(num_steps):
            begun_s = time.perf_counter()
            self._leader.step(rows)
            times.append(time.perf_counter() - begun_s)
        return statistics.median(times)


def _sequence(name: str, num_tokens: int, first_block: int) -> Sequence:
    blocks = range(first_block, first_block + -(-num_tokens // _BLOCK_SIZE))
    tokens = [5 + place % 1000 for place in range(num_tokens)]
    sampling = SamplingParams(max_tokens=1000, temperature=0.0)
    return Sequence(name, 1, tokens, num_tokens, sampling, 0.0, block_tables=[list(blocks)])


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--ranks", default="1,2", show_default=True, help="Numbers of ranks, which divide 16.")
def main(ranks: str) -> None:
    """Measure and print."""
    print("| ranks | read of the checkpoint by one | its memory | step of 1 row | of 8 rows | prompt of 512 tokens |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory(prefix="kvrelay-ranks-") as temporary:
        directory = Path(temporary)
        elsewhere(write_random, directory)
        for num_ranks in map(int, ranks.split(",")):
            read = elsewhere(read_nbytes, directory, num_ranks)
            settings = ModelSettings(
                model=temporary, device="cpu", dtype="bfloat16", tensor_parallel=num_ranks, threads=os.cpu_count()
            )
            engine = load_engine(
                settings, _KV, FakeSettings(), max_num_seqs=8, max_batched_tokens=None, decodes=True,
                progress=lambda *_: None,
            )  # fmt: skip
            try:
                process = psutil.Process()
                steps = Steps(Leader(engine))
                times = (steps.decode_s(1), steps.decode_s(8), steps.prefill_s())
                memory = (process if num_ranks == 1 else process.children()[-1]).memory_info().rss
            finally:
                engine.close()
            cells = (f"{read / 2**20:.0f} MiB", f"{memory / 2**20:.0f} MiB", *(f"{one * 1e3:.1f} ms" for one in times))
            print(f"| {num_ranks} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
