"""Graphs of decode steps of a model with an indexer, over Triton's interpreter: those of short and of long sequences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine import pool_and_card, torch_engine
from kvrelay.engine.backends.cuda.build import decode_graphs
from kvrelay.engine.backends.cuda.ops import CudaOps
from kvrelay.engine.backends.cuda.trial import compile_steps
from kvrelay.engine.config.model import load_config
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.leader import Leader
from kvrelay.engine.step.sequence import Sequence
from kvrelay.engine.torch_engine import TorchEngine
from tests.triton_interpreter import mend_loops

from .test_types import options_of, saved

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers warns of what tiny configurations leave out
    pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for graphs on a CPU"),
]
SHORT, LONG = [5, 6, 7], list(range(3, 23))  # below and above index_topk, which is 8


class Recorder:
    """What a graph does, without a GPU: the same function on the same memory, the result in the same place."""

    def __init__(self) -> None:
        self.replays: list[int] = []

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        index = len(self.replays)
        self.replays.append(0)

        def replay() -> None:
            self.replays[index] += 1
            run()

        return replay


def tokens(engine: TorchEngine, prompts: list[list[int]], num_steps: int) -> list[list[int]]:
    """What ``engine`` generates for ``prompts``, which decode in one batch."""
    params = SamplingParams(max_tokens=99, temperature=0.0)
    rows = [
        Sequence(str(index), 1, list(prompt), len(prompt), params, 0.0, block_tables=[list(range(4 * index, 4 * index + 4))])
        for index, prompt in enumerate(prompts)
    ]  # fmt: skip
    leader = Leader(engine)
    for _ in range(num_steps):
        for row, result in zip(
            rows, leader.step([StepRow(row, row.num_uncomputed_tokens) for row in rows]), strict=True
        ):
            row.num_computed_tokens = len(row.token_ids)
            row.token_ids.append(result.tokens[0].token_id)
    return [row.token_ids[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


@pytest.mark.full
@pytest.mark.timeout(300)  # the interpreter takes a quarter of a minute on a quiet machine
@torch.inference_mode()
def test_graphs_of_short_and_of_long_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("glm_moe_dsa", tmp_path, num_hidden_layers=3)
    options = options_of(tmp_path, block_size=8, num_blocks=12, max_num_seqs=2, max_model_len=32)
    batches = [SHORT], [SHORT, LONG]
    plain = TorchEngine.load(options, lambda *_: None)
    expected = [tokens(plain, prompts, 3) for prompts in batches]
    mend_loops(monkeypatch)
    monkeypatch.setattr(torch_engine, "cpu_ops", lambda options, *of: CudaOps(*of, options.max_num_seqs))
    monkeypatch.setattr(
        pool_and_card, "KvPool", lambda *of, num_spare, staging, shared_memory: KvPool(*of, num_spare=1)
    )
    engine, recorder = TorchEngine.load(options, lambda *_: None), Recorder()
    compile_steps(engine._model, engine._ops, engine._pool, options)
    engine._graphs = decode_graphs(
        load_config(tmp_path), engine._model, engine._ops, engine._pool, options, torch.float32, recorder
    )
    assert [tokens(engine, prompts, 3) for prompts in batches] == expected
    # Captured for 2 and 1 rows, each of long and of short sequences.
    assert recorder.replays == [2, 0, 0, 2]
