"""The real engine against transformers: every architecture, ragged chunked batches, cached prefixes, decode."""

from __future__ import annotations

import json
import math
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvrelay.common.errors import ModelError
from kvrelay.engine import torch_engine
from kvrelay.engine.backends import options as engine_options
from kvrelay.engine.backends.cpu.linear import has_packed_linear
from kvrelay.engine.step.interface import DeviceFailedError, StepRow
from kvrelay.engine.step.sequence import Sequence
from kvrelay.engine.torch_engine import TorchEngine
from tests.engine.conftest import SIZES, VOCAB, assert_same_tokens, load, save_model, sequence, tokens
from tests.engine.led import step

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 5, "moe_intermediate_size": 48}

ARCHITECTURES = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama-tied": lambda: transformers.LlamaConfig(**{**SIZES, "tie_word_embeddings": True}),
    "llama-mha": lambda: transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 6}),
    "llama-mqa-tied": lambda: transformers.LlamaConfig(
        **{**SIZES, "num_key_value_heads": 1, "tie_word_embeddings": True}
    ),
    "llama-biases": lambda: transformers.LlamaConfig(**{**SIZES, "attention_bias": True, "mlp_bias": True}),
    "llama3-rope": lambda: transformers.LlamaConfig(**{**SIZES, "rope_parameters": LLAMA3_ROPE}),
    "yarn-rope": lambda: transformers.LlamaConfig(**{**SIZES, "rope_parameters": YARN_ROPE}),
    "linear-rope": lambda: transformers.LlamaConfig(**{**SIZES, "rope_parameters": LINEAR_ROPE}),
    "mistral-window": lambda: transformers.MistralConfig(**SIZES, sliding_window=19),
    "mistral-no-window": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen2-window": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=13, max_window_layers=1
    ),
    "qwen2-layer-types": lambda: transformers.Qwen2Config(
        **SIZES,
        use_sliding_window=True,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen3": lambda: transformers.Qwen3Config(**{**SIZES, "head_dim": 32}),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True),
    "qwen3-moe-dense-layer": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, decoder_sparse_step=2),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **SIZES | EXPERTS,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        attention_bias=True,
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, **EXPERTS, sliding_window=None),
    "glm-4.5": lambda: transformers.Glm4MoeConfig(
        **{**SIZES, "head_dim": 32, "rope_parameters": dict(SIZES["rope_parameters"])},  # it adds to the dictionary
        moe_intermediate_size=48,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        attention_bias=True,
        use_qk_norm=True,
    ),
    "glm-4.5-air-yarn": lambda: transformers.Glm4MoeConfig(
        **{**SIZES, "rope_parameters": {**YARN_ROPE, "partial_rotary_factor": 0.5}},
        moe_intermediate_size=48,
        n_routed_experts=4,
        num_experts_per_tok=2,
        attention_bias=True,
    ),
    "qwen3-bias": lambda: transformers.Qwen3Config(**{**SIZES, "attention_bias": True}),
}


def logprobs(result: Any) -> torch.Tensor:
    """A sampled token's log probabilities in vocabulary order."""
    dense = torch.full((VOCAB,), -math.inf)
    for token_id, value in result.top_logprobs:
        dense[token_id] = value
    return dense


def reference(model: Any, token_ids: list[int]) -> torch.Tensor:
    """transformers' log probabilities of the token after each of ``token_ids``, from one plain forward pass."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([token_ids]), use_cache=False).logits[0].float(), dim=-1)


def run(engine: TorchEngine, rows: list[tuple[Sequence, int]]) -> list[Any]:
    """Run one step and update the sequences as a scheduler does."""
    results = step(engine, [StepRow(row, count) for row, count in rows])
    for (row, count), result in zip(rows, results, strict=True):
        assert (result is not None) == (count == row.num_uncomputed_tokens)
        row.num_computed_tokens += count
        if result is not None:
            row.token_ids.append(result.token_id)
    return results


def check(model: Any, row: Sequence, result: Any, tolerance: float) -> None:
    expected = reference(model, row.token_ids[:-1])[-1]
    torch.testing.assert_close(logprobs(result), expected, atol=tolerance, rtol=tolerance)


def drive(engine: TorchEngine, model: Any, tolerance: float) -> None:
    """Chunked ragged prefill mixed with decode. Every sampled distribution is compared."""
    every = {"num_logprobs": VOCAB, "num_groups": len(engine.card.layout.geometry.groups)}
    blocks = list(range(engine.card.num_blocks))
    random.Random(3).shuffle(blocks)
    lengths = (1, 70, 16, 33, 300, 2)
    rows = []
    for index, length in enumerate(lengths):
        num_blocks = (length + 20) // 16 + 1
        rows.append(sequence(tokens(index, length), [blocks.pop() for _ in range(num_blocks)], **every))
    # A cached prefix: the sibling reads the fourth row's first two blocks and computes only the rest.
    sibling = sequence(rows[3].token_ids[:32] + tokens(9, 21), [blocks.pop() for _ in range(4)], **every)
    for its, shared in zip(sibling.block_tables, rows[3].block_tables, strict=True):
        its[:2] = shared[:2]
    chunks = (1, 17, 16, 33, 130, 2)
    first = [(row, min(count, row.num_uncomputed_tokens)) for row, count in zip(rows, chunks, strict=True)]
    for (row, _), result in zip(first, run(engine, first), strict=True):
        if result is not None:
            check(model, row, result, tolerance)
    sibling.num_computed_tokens = 32
    rows.append(sibling)
    for _ in range(10):
        chosen = [(row, min(90, row.num_uncomputed_tokens)) for row in rows]
        for (row, _), result in zip(chosen, run(engine, chosen), strict=True):
            if result is not None:
                check(model, row, result, tolerance)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_gives_transformers_distributions(name: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, ARCHITECTURES[name](), shard_size="60KB" if name == "qwen2" else "5GB")
    if name == "qwen2":
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
    drive(load(tmp_path), model, 2e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.25), ("float16", 0.03)])
def test_half_precision_is_near_the_fp32_model(dtype: str, tolerance: float, tmp_path: Path) -> None:
    # Smaller weights than elsewhere, because a deep random model with large weights amplifies rounding errors.
    model = save_model(tmp_path, transformers.LlamaConfig(**{**SIZES, "initializer_range": 0.12}))
    engine = load(tmp_path, dtype=dtype)
    assert engine.card.layout.geometry.groups[0].dtype == dtype
    drive(engine, model, tolerance)


@pytest.mark.parametrize(("why_not", "expected"), [(None, "bfloat16"), ("there is no g++", "float32")])
def test_a_cpu_without_bf16_products_has_the_checkpoints_type_by_our_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why_not: str | None, expected: str
) -> None:
    save_model(tmp_path, transformers.LlamaConfig(**SIZES), dtype=torch.bfloat16)
    monkeypatch.setattr(engine_options, "has_packed_linear", lambda dtype: dtype == torch.float32)
    monkeypatch.setattr(torch_engine, "why_no_cpu_kernels", lambda options, config: why_not)
    assert load(tmp_path).card.layout.geometry.groups[0].dtype == expected


def test_many_sequences_and_odd_block_sizes(llama: tuple[Path, Any]) -> None:
    directory, model = llama
    engine = load(directory, block_size=8, num_blocks=400, max_num_seqs=70)
    rows = [
        sequence(tokens(seed, 1 + seed % 23), [4 * seed + place for place in range(4)], num_logprobs=VOCAB)
        for seed in range(70)
    ]
    for _ in range(2):
        results = run(engine, [(row, row.num_uncomputed_tokens) for row in rows])
        for row, result in list(zip(rows, results, strict=True))[::9]:
            check(model, row, result, 2e-5)


def test_results_follow_the_callers_order_and_do_not_depend_on_the_batch(llama: tuple[Path, Any]) -> None:
    directory, _ = llama
    engine = load(directory)
    sampling = {"temperature": 0.9, "seed": 11}

    def rows() -> list[Sequence]:
        return [
            sequence(tokens(seed, 5 + 9 * seed), list(range(6 * seed, 6 * seed + 6)), **sampling) for seed in range(5)
        ]

    together = rows()
    for _ in range(6):
        run(engine, [(row, row.num_uncomputed_tokens) for row in reversed(together)])
    for row, lone in zip(together, rows(), strict=True):
        for _ in range(6):
            run(engine, [(lone, lone.num_uncomputed_tokens)])
        assert lone.token_ids == row.token_ids


def test_blocks_moved_through_the_store_continue_the_sequence(llama: tuple[Path, Any]) -> None:
    directory, model = llama
    prefill, decode = load(directory), load(directory)
    assert prefill.card.layout.fingerprint() == decode.card.layout.fingerprint()
    source = sequence(tokens(1, 45), [5, 9, 2, 30], num_logprobs=VOCAB)
    run(prefill, [(source, 45)])
    target = sequence(source.token_ids, [40, 41, 42], num_logprobs=VOCAB)
    for ours, theirs in zip(source.block_tables[0][:3], target.block_tables[0], strict=True):
        decode.store.open_write(theirs, 0)[:] = prefill.store.open_read(ours, 0)
        prefill.store.close_read(ours)
        decode.store.close_write(theirs)
    target.num_computed_tokens = 45
    (result,) = run(decode, [(target, 1)])
    check(model, target, result, 2e-5)


def test_a_block_table_that_is_too_short_is_refused(llama: tuple[Path, Any]) -> None:
    engine = load(llama[0])
    row = sequence(tokens(0, 33), [1, 2])
    with pytest.raises(ValueError, match="33 tokens behind 0 do not fit 2 blocks of 16"):
        step(engine, [StepRow(row, 33)])
    with pytest.raises(ValueError, match="0 tokens"):
        step(engine, [StepRow(row, 0)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_broken_sequence_leaves_nothing_in_its_blocks(dtype: str, llama: tuple[Path, Any]) -> None:
    engine = load(llama[0], dtype=dtype)
    poison, clean = 5, [token for token in tokens(2, 40) if token != 5]
    look_up = engine._model._look_up

    def poisoned(token_ids: torch.Tensor) -> torch.Tensor:
        return look_up(token_ids).masked_fill(token_ids[:, None] == poison, math.nan)

    engine._model._look_up = poisoned

    def outcome(blocks: list[int]) -> list[Any]:
        row = sequence(clean, blocks, num_logprobs=4)
        return [run(engine, [(row, row.num_uncomputed_tokens)])[0] for _ in range(3)]

    expected = outcome([10, 11, 12])
    broken = sequence([poison] * 60, [0, 1, 2, 3])
    beside = sequence(clean, [20, 21, 22], num_logprobs=4)
    results = run(engine, [(broken, 60), (beside, len(clean))])
    assert_same_tokens([results[1]], [expected[0]])
    assert outcome([3, 2, 1]) == expected


def test_an_empty_step_is_no_step(llama: tuple[Path, Any]) -> None:
    assert step(load(llama[0]), []) == []


def test_the_card_is_bounded_by_model_request_and_pool(
    llama: tuple[Path, Any], caplog: pytest.LogCaptureFixture
) -> None:
    directory, _ = llama
    assert load(directory).card.max_model_len == 1024
    assert load(directory, max_model_len=100).card.max_model_len == 100
    assert "--max-model-len" not in caplog.text
    assert load(directory, max_model_len=2000).card.max_model_len == 1024
    assert "--max-model-len is 2000, but the model takes 1024 tokens" in caplog.text
    card = load(directory, num_blocks=10).card
    assert (card.max_model_len, card.vocab_size, card.num_blocks) == (160, VOCAB, 10)
    assert card.block_nbytes == 3 * 2 * 2 * 16 * 16 * 4
    by_memory = load(directory, num_blocks=None, kv_memory_bytes=50 * card.block_nbytes + 5).card
    assert by_memory.num_blocks == 50


def test_a_pool_too_small_for_anything_is_refused(llama: tuple[Path, Any]) -> None:
    with pytest.raises(ModelError, match="--kv-memory-mb gives a pool of 0 blocks"):
        load(llama[0], num_blocks=None, kv_memory_bytes=1000)
    with pytest.raises(ModelError, match="--num-blocks gives a pool of 3 blocks of 16 tokens; at least 64"):
        load(llama[0], num_blocks=3)


@pytest.mark.parametrize("num_blocks", [2**34, 2**60])
def test_a_pool_larger_than_the_memory_is_refused(num_blocks: int, llama: tuple[Path, Any]) -> None:
    with pytest.raises(ModelError, match=rf"a KV pool of {num_blocks} blocks .* lower --num-blocks or --kv-memory-mb"):
        load(llama[0], num_blocks=num_blocks)


def test_cuda_without_a_gpu_is_refused(llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match=r"--device is cuda, but torch finds no GPU; use --device cpu"):
        load(llama[0], device="cuda")
    assert load(llama[0], device="auto")._device == torch.device("cpu")


def test_int8_weights_stay_near_the_model_and_are_told_apart_from_it(llama: tuple[Path, Any]) -> None:
    if not has_packed_linear(torch.bfloat16):
        pytest.skip("this CPU has no bf16 kernels")
    full, engine = load(llama[0], dtype="bfloat16"), load(llama[0], dtype="bfloat16", weight_format="int8")
    prompt = tokens(3, 40)

    def first(engine: TorchEngine) -> Any:
        row = sequence(prompt, [0, 1, 2], num_logprobs=4)
        return run(engine, [(row, len(prompt))])[0]

    exact, rounded = first(full), first(engine)
    assert rounded.logprob != exact.logprob
    assert rounded.logprob == pytest.approx(exact.logprob, abs=0.2)
    assert engine.card.layout.weights_digest != full.card.layout.weights_digest


def test_int8_weights_need_bf16(llama: tuple[Path, Any]) -> None:
    with pytest.raises(
        ModelError, match=r"--weight-format is int8, which needs --dtype bfloat16 .* not torch\.float32"
    ):
        load(llama[0], dtype="float32", weight_format="int8")


def test_a_device_that_answers_nothing_any_more_is_told_from_a_step_that_failed(
    llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(llama[0])
    engine.check_device()

    def fail_with(error: Exception) -> None:
        def upload(arrays: Any) -> Any:
            raise error

        monkeypatch.setattr(engine._ops, "upload", upload)

    fail_with(torch.OutOfMemoryError("who asks for less may get it"))
    engine.check_device()
    fail_with(RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(DeviceFailedError, match="cpu does not even read a number back: CUDA error: an illegal"):
        engine.check_device()


def test_a_trace_has_the_steps_that_were_asked_for(
    llama: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine = load(llama[0])
    assert engine.profiler.ask(2) is not None
    row = sequence(tokens(1, 20), [5, 9])
    for count in (12, 8, 1):
        run(engine, [(row, count)])
    (path,) = tmp_path.glob("kvrelay-profile-*/rank-0.json")
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    assert names.count("step") == 2
    assert any(str(name).startswith("aten::") for name in names), "no operation is in the trace"
