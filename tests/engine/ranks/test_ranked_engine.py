"""Several ranks compute the same as one rank."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kvrelay.engine.backends.cpu.linear import has_packed_linear
from kvrelay.engine.step.interface import StepRow
from tests.engine.conftest import SIZES, VOCAB, assert_same_tokens, load, save_model, sequence
from tests.engine.led import step
from tests.engine.weights.stored_models import save_gpt_oss, save_in_format, save_llama

from .conftest import load_ranks
from .rig import ROUNDING, expect_what_one_rank_gives, run, wait_until


def test_log_probabilities_and_blocks_are_those_of_one_rank(engine: Any, model: Path) -> None:
    expect_what_one_rank_gives(engine, load(model, model_id=model.name))


def test_experts_and_sinks_are_cut_as_they_are_one_model(tmp_path: Path) -> None:
    given = {"num_experts_per_tok": 2, "num_local_experts": 5, "attention_bias": True, "sliding_window": 9}
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    save_model(tmp_path, transformers.GptOssConfig(**SIZES, **given, layer_types=layer_types))
    engine: Any = load_ranks(tmp_path, 2)
    try:
        (_, result), (_, expected) = (run(one, num_logprobs=VOCAB) for one in (engine, load(tmp_path)))
        assert_same_tokens([result], [expected], ROUNDING)
    finally:
        engine.close()


SPARSE: dict[str, tuple[Any, int]] = {  # and the number of ranks
    "gpt_oss-2": (
        transformers.GptOssConfig(
            **SIZES, num_experts_per_tok=2, num_local_experts=5, attention_bias=True, sliding_window=None
        ),
        2,
    ),
    "mixtral-2": (
        transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None), 2
    ),
    "qwen3_moe-3": (
        transformers.Qwen3MoeConfig(
            **{**SIZES, "num_key_value_heads": 3}, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=32,
            mlp_only_layers=[1], norm_topk_prob=True,
        ), 3
    ),
    "glm4_moe-2": (
        transformers.Glm4MoeConfig(
            **{**SIZES, "rope_parameters": dict(SIZES["rope_parameters"])}, n_routed_experts=5, num_experts_per_tok=2,
            moe_intermediate_size=32, attention_bias=True, use_qk_norm=True,
        ), 2
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", SPARSE)
def test_ranks_with_whole_experts_compute_what_one_rank_does(tmp_path: Path, family: str) -> None:
    config, num_ranks = SPARSE[family]
    save_model(tmp_path, config)
    engine: Any = load_ranks(tmp_path, num_ranks, expert_parallel=True)
    try:
        (_, result), (_, expected) = (run(one, num_logprobs=VOCAB) for one in (engine, load(tmp_path)))
        assert_same_tokens([result], [expected], ROUNDING)
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["awq by 96", "gptq-act-order", "mxfp4"])
def test_ranks_of_a_quantised_checkpoint_compute_what_one_rank_does(name: str, tmp_path: Path) -> None:
    """On CPUs each rank dequantises its part of the weights."""
    directory = tmp_path / "stored"
    if name == "mxfp4":
        directory.mkdir()
        save_gpt_oss(directory)
    else:
        (tmp_path / "full").mkdir()
        save_llama(tmp_path / "full")
        save_in_format(tmp_path / "full", directory, name)
    engine: Any = load_ranks(directory, 2, dtype="float32")
    try:
        (_, result), (_, expected) = (
            run(one, num_logprobs=VOCAB) for one in (engine, load(directory, dtype="float32"))
        )
        assert_same_tokens([result], [expected], ROUNDING)
    finally:
        engine.close()


def test_ranks_with_rounded_weights_compute_what_one_rank_does(tmp_path: Path) -> None:
    """Both have the same 8-bit weights, but two ranks round two partial sums to bf16. Rounding to 8 bits changes more
    than that."""
    if not has_packed_linear(torch.bfloat16):
        pytest.skip("this CPU has no bf16 kernels")
    save_model(tmp_path, transformers.LlamaConfig(**{**SIZES, "initializer_range": 0.05}))
    chosen: dict[str, Any] = {"weight_format": "int8", "dtype": "bfloat16"}
    engine: Any = load_ranks(tmp_path, 2, **chosen)
    try:
        two, one, full = (
            dict(run(which, num_logprobs=VOCAB)[1].top_logprobs)
            for which in (engine, load(tmp_path, **chosen), load(tmp_path, dtype="bfloat16"))
        )
    finally:
        engine.close()
    distances = [np.std([which[token_id] - one[token_id] for token_id in one]) for which in (two, full)]
    assert distances[0] < 0.5 * distances[1], distances


def test_blocks_of_one_rank_continue_on_two_and_back(engine: Any, model: Path) -> None:
    """Blocks are copied from one rank to two and back, and the next token is the same."""
    alone = load(model, model_id=model.name)
    for source, target in ((alone, engine), (engine, alone)):
        row, result = run(source, num_logprobs=5)
        row.token_ids.append(result.token_id)
        moved = sequence(row.token_ids, [60, 61, 62], num_logprobs=5)
        for ours, theirs in zip(row.block_tables[0][:3], moved.block_tables[0], strict=True):
            given = source.store.open_read(ours, 0)
            target.store.open_write(theirs, 0)[:] = given if isinstance(given, memoryview) else given.wait(None, 1)
            target.store.close_write(theirs)
        moved.num_computed_tokens = 45
        (next_token,) = step(target, [StepRow(moved, 1)])
        (expected,) = step(source, [StepRow(row, 1)])
        assert next_token is not None
        assert expected is not None
        assert_same_tokens([next_token], [expected], ROUNDING)


def test_each_rank_writes_a_trace_of_the_same_steps(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    engine: Any = load_ranks(model, 2)
    try:
        pattern = engine.profiler.ask(2)
        assert pattern is not None
        assert engine.profiler.ask(1) is None
        run(engine)
        wait_until(lambda: len(list(tmp_path.glob("kvrelay-profile-*/rank-1.json"))) == 1, "no trace of rank 1")
        run(engine)  # the first rank has written its trace by then
        traces = sorted(tmp_path.glob("kvrelay-profile-*/rank-*.json"), key=lambda path: path.name)
        assert [path.name for path in traces] == ["rank-0.json", "rank-1.json"]
        for path in traces:
            names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
            assert names.count("step") == 2, path
        assert engine.profiler.ask(1) is not None
    finally:
        engine.close()
