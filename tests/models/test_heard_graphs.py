"""Graphs of decode steps leave the hidden states that a head, or a layer for drafting, guesses from. Over Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvrelay.engine import pool_and_card, torch_engine
from kvrelay.engine.backends.cuda.build import decode_graphs
from kvrelay.engine.backends.cuda.ops import CudaOps
from kvrelay.engine.config.head import load_head_config
from kvrelay.engine.config.model import load_config
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.torch_engine import TorchEngine
from tests.draft_layers import save_with_draft_layer
from tests.engine.conftest import SIZES, save_model
from tests.engine.models.test_draft_head import Texts
from tests.heads import ReferenceHead, save_head
from tests.triton_interpreter import mend_loops

from .test_picked_graphs import Recorder
from .test_types import options_of

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers warns of what tiny configurations leave out
    pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for graphs on a CPU"),
    pytest.mark.full,
    pytest.mark.timeout(300),
]

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize("kind", ["head", "mtp"])
@torch.inference_mode()
def test_drafts_behind_graphs_are_those_of_the_reference(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, head = tmp_path / "model", tmp_path / "head"
    model.mkdir()
    head.mkdir()
    reference: Any
    sizes = {"block_size": 8, "num_blocks": 48, "max_num_seqs": 2, "max_model_len": 128}
    if kind == "head":
        save_model(model, transformers.LlamaConfig(**{**SIZES, **SMALL}))
        save_head(head, model, num_drafted=66, taps=(0, 1))
        reference = ReferenceHead(head, model)
        options = options_of(model, taps=load_head_config(head, load_config(model)).taps, **sizes)
    else:
        reference = save_with_draft_layer(model, "deepseek_v3", is_dense=True, num_hidden_layers=2)
        options = options_of(model, taps=(), mtp_kv_bytes=2**20, **sizes)
    mend_loops(monkeypatch)
    monkeypatch.setattr(torch_engine, "cpu_ops", lambda options, *of: CudaOps(*of, options.max_num_seqs))
    monkeypatch.setattr(
        pool_and_card, "KvPool", lambda *of, num_spare, staging, shared_memory: KvPool(*of, num_spare=1)
    )
    engine, recorder = TorchEngine.load(options, lambda *_: None), Recorder()
    if kind == "head":
        engine.load_head(head, 2**20)
    assert engine.head is not None
    engine._graphs = decode_graphs(
        load_config(model), engine._model, engine._ops, engine._pool, options, torch.float32, recorder
    )
    texts = Texts(engine, engine.head, seed=3)
    long, short = texts.begin(5), texts.begin(4)
    texts.step([long, short], 3)
    texts.step([long], 1)
    texts.step([long, short])
    texts.step([short])
    assert sum(recorder.replays) == 2  # the other steps were of prompts
    assert texts.drafts([long, short], 2) == [reference.draft(text.token_ids, 0, 2) for text in (long, short)]
