"""Adapters in the engine: a batch with several adapters gives the merged models' tokens, and other rows are
unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvrelay.common.adapter_files import WEIGHTS_FILE, AdapterAbsentError, AdapterError, AdapterRef, adapter_digest
from kvrelay.engine.step.interface import AdapterSlots, StepRow
from kvrelay.engine.step.sequence import Sequence
from kvrelay.engine.torch_engine import TorchEngine
from tests.adapters import PROJECTIONS, linear_shapes, merge, write_adapter
from tests.engine.conftest import SIZES, VOCAB, load, save_model, sequence, tokens
from tests.engine.led import step

FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**{**SIZES, "attention_bias": True, "mlp_bias": True}),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=19),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **SIZES,
        num_experts_per_tok=2,
        num_local_experts=3,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        attention_bias=True,
    ),
    "glm-4.5": lambda: transformers.Glm4MoeConfig(
        **{**SIZES, "rope_parameters": dict(SIZES["rope_parameters"])},
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        attention_bias=True,
    ),
}
LENGTHS = (5, 21, 33, 18)
NUM_TOKENS = 6
PATTERN = {"q_proj": 40, "layers.0.self_attn.v_proj": 1}


def slots_of(engine: TorchEngine) -> AdapterSlots:
    assert engine.adapters is not None
    return engine.adapters


def generate(engine: TorchEngine, adapters: list[int], chunk: int = 16) -> list[list[int]]:
    """Greedy tokens of a sequence for each adapter, all in one batch. Prompts are computed in chunks beside single
    tokens."""
    sequences: list[Sequence] = []
    for index, adapter in enumerate(adapters):
        prompt, blocks = tokens(index, LENGTHS[index % len(LENGTHS)]), list(range(index * 4, index * 4 + 4))
        one = sequence(prompt, blocks, num_groups=len(engine.card.layout.geometry.groups))
        one.adapter = adapter
        sequences.append(one)
    while any(one.num_output_tokens < NUM_TOKENS for one in sequences):
        rows = [
            StepRow(one, min(chunk, one.num_uncomputed_tokens))
            for one in sequences
            if one.num_output_tokens < NUM_TOKENS
        ]
        for row, token in zip(rows, step(engine, rows), strict=True):
            row.sequence.num_computed_tokens += row.num_tokens
            if token is not None:
                row.sequence.token_ids.append(token.token_id)
    return [one.token_ids[one.num_prompt_tokens :] for one in sequences]


@pytest.fixture(scope="module", params=FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save_model(directory, FAMILIES[request.param]())
    return directory


def test_a_batch_of_base_and_adapters_gives_what_merged_models_give(base: Path, tmp_path: Path) -> None:
    """The adapters differ in rank, layers, patterns and rslora. The row without an adapter gives the base's tokens."""
    shapes = linear_shapes(base)
    few = {
        name: shape
        for name, shape in shapes.items()
        if "layers.1" not in name and not name.endswith(("k_proj", "o_proj"))
    }
    refs = [
        write_adapter(tmp_path / "all", shapes, rank=4, seed=1),
        write_adapter(tmp_path / "few", few, rank=7, seed=2, use_rslora=True, alpha=3),
        write_adapter(tmp_path / "patterns", shapes, seed=3, ranks=PATTERN, alpha_pattern={"v_proj": 30}),
    ]
    engine = load(base, dtype="float32", adapter_bytes=1)
    slots = slots_of(engine)
    for slot, ref in enumerate(refs, start=1):
        slots.load(slot, tmp_path / ref.name, ref.digest)
    found = generate(engine, [0, 1, 2, 3])
    plain = load(base, dtype="float32")
    assert plain.adapters is None
    expected = [generate(plain, [0])]
    for index, ref in enumerate(refs, start=1):
        merge(base, tmp_path / ref.name, tmp_path / f"merged-{ref.name}")
        merged = load(tmp_path / f"merged-{ref.name}", dtype="float32")
        expected.append(generate(merged, [0] * (index + 1))[index:])
    assert found == [one for [one] in expected]
    assert found[1:] != generate(plain, [0] * 4)[1:], "the adapters change nothing"


@pytest.fixture
def engine(llama: tuple[Path, Any]) -> TorchEngine:
    return load(llama[0], dtype="float32", adapter_bytes=1)


def test_a_slot_is_used_again(llama: tuple[Path, Any], engine: TorchEngine, tmp_path: Path) -> None:
    """Nothing of the adapter before remains, even in layers that the next adapter does not change."""
    shapes = linear_shapes(llama[0])
    first = write_adapter(tmp_path / "first", shapes, seed=1)
    second = write_adapter(
        tmp_path / "second", {name: one for name, one in shapes.items() if name.endswith("v_proj")}, seed=2
    )
    slots = slots_of(engine)
    slots.load(2, tmp_path / "second", second.digest)
    expected = generate(engine, [2])
    slots.load(1, tmp_path / "first", first.digest)
    assert generate(engine, [1]) != expected
    slots.unload(1)
    slots.load(1, tmp_path / "second", second.digest)
    assert generate(engine, [1]) == expected
    with pytest.raises(ValueError, match="slots"):
        generate(engine, [3])


def test_an_engine_that_was_started_for_none_refuses_rows_with_adapters(llama: tuple[Path, Any]) -> None:
    with pytest.raises(ValueError, match="started for none"):
        generate(load(llama[0], dtype="float32"), [1])


def refused(engine: TorchEngine, ref: AdapterRef, directory: Path, named: str) -> None:
    slots = slots_of(engine)
    before = generate(engine, [0])
    with pytest.raises(AdapterError, match=named):
        slots.load(1, directory, ref.digest)
    assert generate(engine, [0]) == before, "the refused adapter left something behind"
    with pytest.raises(ValueError, match="slots"):
        generate(engine, [1])


def test_another_bases_adapter_is_refused(llama: tuple[Path, Any], engine: TorchEngine, tmp_path: Path) -> None:
    shapes = linear_shapes(llama[0])
    name = "model.layers.2.mlp.down_proj"
    wide = write_adapter(tmp_path / "wide", shapes | {name: (48, 96)})
    refused(
        engine,
        wide,
        tmp_path / "wide",
        r"layers.2.mlp.down_proj is for a base of shape \(48, 96\); this model's is \(48, 80\)",
    )
    deep = write_adapter(tmp_path / "deep", shapes | {"model.layers.3.mlp.down_proj": (48, 80)})
    refused(engine, deep, tmp_path / "deep", "no model.layers.3.mlp.down_proj in this model")
    head = write_adapter(tmp_path / "head", {"lm_head": (VOCAB, 48)})
    refused(engine, head, tmp_path / "head", "no lm_head in this model")


def test_files_that_were_changed_are_refused(llama: tuple[Path, Any], engine: TorchEngine, tmp_path: Path) -> None:
    """The digest of the files must be the one that the gateway saw."""
    write_adapter(tmp_path / "a", linear_shapes(llama[0]), seed=1)
    refused(engine, AdapterRef("a", "0" * 32), tmp_path / "a", "its files were changed")


@pytest.mark.parametrize("kept", [0, 100, -1])
def test_half_copied_files_are_an_adapter_that_is_not_there_yet(
    llama: tuple[Path, Any], engine: TorchEngine, tmp_path: Path, kept: int
) -> None:
    """An incomplete file may still be on its way, so it is reported as absent, and clients may ask again."""
    ref = write_adapter(tmp_path / "a", linear_shapes(llama[0]))
    path = tmp_path / "a" / WEIGHTS_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    with pytest.raises(AdapterAbsentError, match="not all there yet"):
        slots_of(engine).load(1, tmp_path / "a", ref.digest)
    refused(engine, AdapterRef("a", adapter_digest(tmp_path / "a")), tmp_path / "a", "truncated|fetch it again")
    path.write_bytes(whole)
    slots_of(engine).load(1, tmp_path / "a", ref.digest)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_our_kernels_give_a_row_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    """In bf16, a sequence gets the same tokens alone and beside others, and with its prompt in any chunks."""
    sizes = {
        **SIZES,
        "hidden_size": 96,
        "intermediate_size": 80,
        "head_dim": 32,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    }
    save_model(tmp_path / "base", transformers.LlamaConfig(**sizes), dtype=torch.bfloat16)
    shapes = linear_shapes(tmp_path / "base")
    refs = [write_adapter(tmp_path / f"a{seed}", shapes, seed=seed, rank=5 + seed) for seed in range(3)]
    engine = load(tmp_path / "base", dtype="bfloat16", cpu_kernels="native", adapter_bytes=1)
    torch_engine = load(tmp_path / "base", dtype="bfloat16", cpu_kernels="torch", adapter_bytes=1)
    for one in (engine, torch_engine):
        for slot, ref in enumerate(refs, start=1):
            slots_of(one).load(slot, tmp_path / ref.name, ref.digest)
    together = generate(engine, [1, 2, 0, 1, 3, 1, 1, 1])
    assert generate(engine, [1, 2, 3, 2])[:2] == together[:2]
    assert generate(engine, [1], chunk=3) == together[:1]
    assert generate(torch_engine, [1, 2, 0, 1])[0][:2] == together[0][:2]


def test_all_projections_are_adapted(base: Path) -> None:
    expected = len(PROJECTIONS) if "gpt-oss" not in str(base) else 4
    assert len({name.rpartition(".")[2] for name in linear_shapes(base)}) == expected
