"""Checks of a model when it is loaded, and the models that they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import tokenizers.models
import torch

from kvrelay.common.errors import ModelError
from kvrelay.common.kv_geometry import Chunk
from kvrelay.engine import torch_engine
from kvrelay.engine.backends.options import EngineOptions
from kvrelay.engine.models.hf import loading
from kvrelay.engine.models.hf import model as hf_model
from kvrelay.engine.models.ops import PagedStep, Scores
from kvrelay.engine.torch_engine import TorchEngine

from ..engine.weights.conftest import edit
from .test_types import engine_of, saved
from .tiny import VOCAB

WRONG: dict[str, tuple[str, Callable[[Scores], Scores]]] = {
    "softcap": ("gemma2", lambda scores: replace(scores, softcap=None)),
    "sinks": ("gpt_oss", lambda scores: replace(scores, sinks=None)),
    "scale": ("granite", lambda scores: replace(scores, scale=None)),
}


@pytest.mark.parametrize("what", WRONG)
def test_attention_that_comes_out_otherwise_than_transformers_is_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, forget = WRONG[what]
    saved(model_type, tmp_path)
    monkeypatch.setattr(hf_model, "Scores", lambda *given: forget(Scores(*given)))
    with pytest.raises(ModelError, match="is not what transformers computes"):
        engine_of(tmp_path)


@pytest.mark.parametrize("fault", ["window", "chunk", "position"])
def test_windows_and_positions_are_checked(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("llama4_text" if fault == "chunk" else "mistral", tmp_path)
    if fault != "position":
        shape_of = hf_model.shape_of

        def with_wrong_windows(*given: Any) -> Any:
            shape = shape_of(*given)
            wrong = tuple(one.size if isinstance(one, Chunk) else None for one in shape.sliding_windows)
            return replace(shape, sliding_windows=wrong)

        monkeypatch.setattr(loading, "shape_of", with_wrong_windows)
    else:
        forward = hf_model.TransformersModel.forward

        class Shifted:
            """A step in which no position is below 5."""

            def __init__(self, step: PagedStep) -> None:
                self.positions = step.positions.clamp(min=5)
                self.kv_write, self.attention = step.kv_write, step.attention

        monkeypatch.setattr(
            hf_model.TransformersModel,
            "forward",
            lambda self, token_ids, step: forward(self, token_ids, Shifted(step)),
        )
    with pytest.raises(ModelError, match="is not what transformers computes"):
        engine_of(tmp_path)


def test_a_long_window_is_checked_as_a_short_one(tmp_path: Path) -> None:
    saved("mistral", tmp_path)
    configure(tmp_path, sliding_window=200)
    assert engine_of(tmp_path, max_model_len=64).card.max_model_len == 64


def test_a_long_chunk_is_found_and_checked_as_a_short_one(tmp_path: Path) -> None:
    saved("llama4_text", tmp_path)
    configure(tmp_path, attention_chunk_size=120)
    engine = engine_of(tmp_path, max_model_len=64)
    assert engine.card.layout.geometry.windows[-1] == Chunk(120)


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if memory for weights is allocated."""
    from_pretrained = loading._from_pretrained

    def refuse(directory: Path, dtype: torch.dtype, device_map: str | None, *args: Any, **more: Any) -> Any:
        assert device_map == "meta", "weights were loaded"
        return from_pretrained(directory, dtype, device_map, *args, **more)

    monkeypatch.setattr(loading, "_from_pretrained", refuse)


def configure(directory: Path, **fields: Any) -> None:
    """Change fields of ``config.json``."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"model__norm__weight": None}, "1 tensors are missing"),
        ({"model__extra__weight": torch.zeros(3)}, "1 tensors are unexpected"),
        ({"model__norm__weight": torch.zeros(63)}, r"1 tensors are mismatched .*model\.norm\.weight"),
        (
            {"model__layers__1__mlp__up_proj__weight": torch.zeros(96, 64, dtype=torch.int8)},
            r"model\.safetensors: tensor model\.layers\.1\.mlp\.up_proj\.weight has format I8",
        ),
    ],
)
@pytest.mark.usefixtures("no_memory")
def test_a_checkpoint_of_other_tensors_is_refused(
    tensors: dict[str, torch.Tensor | None], match: str, tmp_path: Path
) -> None:
    saved("gemma2", tmp_path)
    edit(tmp_path, **tensors)
    with pytest.raises(ModelError, match=match):
        engine_of(tmp_path)


@pytest.mark.usefixtures("no_memory")
def test_a_truncated_file_is_refused_by_name(tmp_path: Path) -> None:
    saved("gemma2", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read .*truncated"):
        engine_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("vocab_size", 10**12, "tensors are mismatched"),
        ("hidden_size", 10**9, "tensors are mismatched"),
        ("num_hidden_layers", 10**4, r"config\.json asks for 10000 layers, but the checkpoint has \d+ tensors"),
        ("num_attention_heads", 10**9, "cannot be loaded by transformers: "),
        ("num_experts", 10**9, "'num_experts' is 1000000000 in config.json; at most 65536 is possible"),
    ],
)
@pytest.mark.usefixtures("no_memory")
@pytest.mark.filterwarnings("ignore")
def test_absurd_sizes_are_refused(name: str, value: int, match: str, tmp_path: Path) -> None:
    saved("gemma2", tmp_path)
    fields: dict[str, Any] = {name: value}
    if name == "num_hidden_layers":
        fields["layer_types"] = ["full_attention"] * value
    configure(tmp_path, **fields)
    with pytest.raises(ModelError, match=match):
        engine_of(tmp_path)


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.usefixtures("no_memory")
def test_a_tokenizer_of_another_model_is_refused(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("llama", tmp_path)
    monkeypatch.setattr(torch_engine, "load_weights", lambda *_, **__: pytest.fail("weights were loaded"))
    load = engine_of if backend == "transformers" else native_engine_of
    write_tokenizer(tmp_path, VOCAB + 1)
    with pytest.raises(ModelError, match=rf"tokenizer\.json has token {VOCAB}, but the model has {VOCAB} tokens"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        load(tmp_path)


def test_a_tokenizer_with_a_token_more_that_was_added_is_taken(tmp_path: Path) -> None:
    """Gemma 3 has such a token for images."""
    saved("llama", tmp_path)
    write_tokenizer(tmp_path, VOCAB, added=["<image>"])
    assert native_engine_of(tmp_path).card.vocab_size == VOCAB


def write_tokenizer(directory: Path, num_words: int, added: list[str] | None = None) -> None:
    """Write a tokenizer with one word for each id."""
    words = {f"w{index}": index for index in range(num_words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.add_special_tokens(added or [])
    tokenizer.save(str(directory / "tokenizer.json"))


def native_engine_of(directory: Path) -> TorchEngine:
    """The engine with our own forward pass."""
    options = EngineOptions(model_dir=directory, model_id="tiny", device="cpu", dtype="float32", num_blocks=96)
    return TorchEngine.load(options, lambda done, total: None)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rope_that_follows_the_longest_sequence_bounds_the_length(kind: str, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    rope: dict[str, Any] = {
        "rope_type": kind,
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    configure(tmp_path, rope_parameters=rope)
    assert engine_of(tmp_path).card.max_model_len == 64


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"weight_format": "int8"}, "--weight-format is int8"),
        ({"kv_dtype": "fp8"}, "--kv-dtype is fp8"),
        ({"fp8_activations": True}, "--fp8-activations is on, which needs a model with a path of its own"),
        ({"cpu_kernels": "native"}, "--cpu-kernels is native, but they have no code for softcaps"),
    ],
)
def test_what_only_models_with_a_path_of_their_own_have_is_refused(
    changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    saved("gemma2", tmp_path)
    with pytest.raises(ModelError, match=match):
        engine_of(tmp_path, **changes)


def test_a_checkpoint_of_an_unknown_quantisation_is_refused(tmp_path: Path) -> None:
    saved("gemma2", tmp_path)
    configure(tmp_path, quantization_config={"quant_method": "quanto"})
    with pytest.raises(ModelError, match="quant_method 'quanto' is not supported; supported are awq, "):
        engine_of(tmp_path)
