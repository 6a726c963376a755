"""Multimodal checkpoints: their text parts are loaded alone, and must be complete."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMultimodalLM, PreTrainedModel
from transformers.utils.logging import set_tqdm_hook

from kvrelay.common.errors import ModelError
from kvrelay.engine.models.hf.loading import load_model
from kvrelay.engine.outline import compare, outline_model, write_random_weights

from .test_quantised import FORMATS, logits_of, ours, stored
from .test_types import BLOCK_SIZE, engine_of, saved

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out

TOWERS = ("vision_tower.", "multi_modal_projector.", "vision_model.", "model.visual.")
TYPES = ("gemma3", "llama4", "qwen3_5", "mistral3")


def rewrite(directory: Path, change: dict[str, str | None]) -> None:
    """Rename the tensors whose names begin with a key of ``change``. None: remove them."""
    path, held = directory / "model.safetensors", {}
    for name, tensor in load_file(path).items():
        prefix = next((one for one in change if name.startswith(one)), "")
        new = change.get(prefix, "")
        if new is not None:
            held[new + name.removeprefix(prefix)] = tensor
    save_file(held, path, metadata={"format": "pt"})


def parameters_of(model: PreTrainedModel) -> int:
    return sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize("model_type", TYPES)
def test_towers_take_no_memory(model_type: str, tmp_path: Path) -> None:
    full = saved(model_type, tmp_path)
    loaded = load_model(tmp_path, torch.float32, torch.device("cpu")).model
    assert not [name for name, _ in loaded.named_parameters() if any(tower in name for tower in TOWERS)]
    assert parameters_of(loaded) == outline_model(tmp_path, "transformers", BLOCK_SIZE).num_parameters
    assert parameters_of(loaded) < parameters_of(full)
    rewrite(tmp_path, dict.fromkeys(TOWERS))
    without = load_model(tmp_path, torch.float32, torch.device("cpu")).model
    assert parameters_of(without) == parameters_of(loaded)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_missing_or_unknown_tensor_of_the_text_part_is_refused(model_type: str, tmp_path: Path) -> None:
    saved(model_type, tmp_path)
    path = tmp_path / "model.safetensors"
    held = load_file(path)
    (norm,) = [name for name in held if name.endswith("layers.1.input_layernorm.weight") and "vision" not in name]
    save_file({name: one for name, one in held.items() if name != norm}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 tensors are missing .*layers\.1\.input_layernorm\.weight the first"):
        engine_of(tmp_path)
    save_file(
        {**held, norm.replace("input_layernorm", "third_norm"): held[norm].clone()}, path, metadata={"format": "pt"}
    )
    with pytest.raises(ModelError, match=r"1 tensors are unexpected .*layers\.1\.third_norm\.weight the first"):
        engine_of(tmp_path)
    save_file({**held, norm: held[norm][:-1].clone()}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 tensors are mismatched .*layers\.1\.input_layernorm\.weight"):
        engine_of(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("gemma3", {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}),
        ("mistral3", {"language_model.model.": "model.language_model.", "vision_tower.": "model.vision_tower."}),
        ("qwen2_5_vl", {"visual.": "model.visual.", "model.": "model.language_model."}),
    ],
)
def test_older_and_newer_names_are_read(model_type: str, names: dict[str, str | None], tmp_path: Path) -> None:
    """A checkpoint keeps the names of the version of transformers that wrote it."""
    saved(model_type, tmp_path)
    wanted = ours(engine_of(tmp_path))
    before = set(load_file(tmp_path / "model.safetensors"))
    rewrite(tmp_path, names)
    assert before - set(load_file(tmp_path / "model.safetensors")), "no name was changed"
    torch.testing.assert_close(ours(engine_of(tmp_path)), wanted, rtol=0, atol=0)


def test_layers_for_drafting_are_passed_over(tmp_path: Path) -> None:
    saved("qwen3_5", tmp_path)
    wanted = ours(engine_of(tmp_path))
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), "mtp.fc.weight": torch.zeros(64, 128)}, path, metadata={"format": "pt"})
    torch.testing.assert_close(ours(engine_of(tmp_path)), wanted, rtol=0, atol=0)


def test_a_quantised_text_part_has_the_logits_of_its_dequantised_weights(tmp_path: Path) -> None:
    made = FORMATS["fp8-blocks"]
    saved("mistral3", tmp_path / "full")
    directory = stored(tmp_path / "full", tmp_path / "fp8", made)
    assert any(name.endswith("q_proj.weight_scale_inv") for name in load_file(directory / "model.safetensors"))
    model = AutoModelForMultimodalLM.from_pretrained(
        directory, quantization_config=made.theirs, dtype=torch.float32, attn_implementation="eager"
    )
    torch.testing.assert_close(ours(engine_of(directory)), logits_of(model), rtol=0, atol=2e-4)


@pytest.mark.parametrize("model_type", ["gemma4", "mistral3"])
def test_without_weights_random_ones_are_compared(model_type: str, tmp_path: Path) -> None:
    """As ``kvrelay check-model`` does."""
    saved(model_type, tmp_path / "full")
    write_random_weights(tmp_path / "full", tmp_path / "random", "transformers")
    assert compare(tmp_path / "random", "transformers") < 1e-4


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("paligemma", "PaliGemmaForConditionalGeneration attends in both directions: it is not served"),
        ("blip-2", "Blip2ForConditionalGeneration does not run with text alone .*'pixel_values'"),
        ("mllama", "MllamaForCausalLM has 4 layers and calls attention 3 times"),
    ],
)
def test_a_type_that_needs_more_than_text_is_refused_before_weights_are_loaded(
    model_type: str, reason: str, tmp_path: Path
) -> None:
    saved(model_type, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=reason):
        outline_model(tmp_path, "auto", BLOCK_SIZE)


@pytest.mark.parametrize("with_towers", [False, True])
def test_no_progress_bar_is_written_into_a_workers_log(
    with_towers: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while a model is checked, loaded, or followed; afterwards bars are as before. No bar is made: it would leave a thread."""
    saved("qwen3_5", tmp_path)
    capfd.readouterr()
    monkeypatch.setattr("tqdm.auto.tqdm", None)
    heard: list[int] = []
    load_model(
        tmp_path, torch.float32, torch.device("cpu"), lambda done, _: heard.append(done), with_towers=with_towers
    )
    load_model(tmp_path, torch.float32, torch.device("cpu"), with_towers=with_towers)
    assert "Loading weights" not in capfd.readouterr().err
    assert len(heard) > 2
    assert set_tqdm_hook(None) is None
