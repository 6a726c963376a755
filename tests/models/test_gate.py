"""What of a model is found out, and refused, when it is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrelay.common.errors import ModelError
from kvrelay.engine.models import transformers_model
from kvrelay.engine.models.ops import PagedStep, Scores

from .test_types import engine_of, saved

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
    monkeypatch.setattr(transformers_model, "Scores", lambda *given: forget(Scores(*given)))
    with pytest.raises(ModelError, match="is not what transformers computes"):
        engine_of(tmp_path)


@pytest.mark.parametrize("fault", ["window", "position"])
def test_windows_and_positions_are_checked(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("mistral", tmp_path)
    if fault == "window":
        shape_of = transformers_model._shape_of

        def without_windows(*given: Any) -> Any:
            shape = shape_of(*given)
            return replace(shape, sliding_windows=(None,) * shape.num_layers)

        monkeypatch.setattr(transformers_model, "_shape_of", without_windows)
    else:
        forward = transformers_model.TransformersModel.forward

        class Shifted:
            """A step whose positions are one too high."""

            def __init__(self, step: PagedStep) -> None:
                self.positions = step.positions.clamp(min=5)
                self.kv_write, self.attention = step.kv_write, step.attention

        monkeypatch.setattr(
            transformers_model.TransformersModel,
            "forward",
            lambda self, token_ids, step: forward(self, token_ids, Shifted(step)),
        )
    with pytest.raises(ModelError, match="is not what transformers computes"):
        engine_of(tmp_path)


def test_a_long_window_is_checked_as_a_short_one(tmp_path: Path) -> None:
    saved("mistral", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window": 200}))
    assert engine_of(tmp_path, max_model_len=64).card.max_model_len == 64


@pytest.mark.parametrize(
    ("kind", "match"), [("missing", "1 tensors are missing"), ("unknown", "1 tensors are unexpected")]
)
def test_a_checkpoint_of_other_tensors_is_refused(kind: str, match: str, tmp_path: Path) -> None:
    saved("gemma2", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    if kind == "missing":
        del tensors["model.norm.weight"]
    else:
        tensors["model.extra.weight"] = torch.zeros(3)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=match):
        engine_of(tmp_path)


def test_a_truncated_file_is_refused_by_name(tmp_path: Path) -> None:
    saved("gemma2", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="cannot be loaded by transformers"):
        engine_of(tmp_path)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rope_that_follows_the_longest_sequence_bounds_the_length(kind: str, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope: dict[str, Any] = {
        "rope_type": kind,
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    assert engine_of(tmp_path).card.max_model_len == 64


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"weight_format": "int8"}, "--weight-format is int8"),
        ({"kv_dtype": "fp8"}, "--kv-dtype is fp8"),
        ({"cpu_kernels": "native"}, "--cpu-kernels is native, but they have no code for the scores"),
    ],
)
def test_what_only_models_with_a_path_of_their_own_have_is_refused(
    changes: dict[str, Any], match: str, tmp_path: Path
) -> None:
    saved("gemma2", tmp_path)
    with pytest.raises(ModelError, match=match):
        engine_of(tmp_path, **changes)


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    saved("gemma2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ModelError, match="quantized checkpoints are not supported"):
        engine_of(tmp_path)
