"""Mistral 4 as its maker publishes it: beside an encoder of images, in fp8, with all experts of a layer in one tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvrelay.common.adapter_files import AdapterError
from kvrelay.common.errors import ModelError
from kvrelay.engine.config.cut import Cut
from kvrelay.engine.config.model import load_config
from kvrelay.engine.models.adapted_layers import in_other_stages
from kvrelay.engine.outline import compare, outline_model
from kvrelay.engine.weights.checkpoint import check_files, load_weights
from kvrelay.engine.weights.parameters import SparseWeights
from kvrelay.engine.weights.stored import StoredWeight
from tests.adapters import linear_shapes, merge, write_adapter
from tests.engine.conftest import load
from tests.models.test_types import saved
from tests.models.tiny import MORE

from .test_adapters import generate, slots_of
from .test_kimi import change_config, change_tensors

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out
FP8 = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}


def in_fp8(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Projections of text with one scale, experts with one each. Scales are in bf16; those of a matrix have no dimension."""
    is_stack = ".experts." in name
    if not name.startswith("language_model.") or not (is_stack or name.endswith(("_proj.weight", "_with_mqa.weight"))):
        return {name: tensor}
    largest = tensor.abs().amax(dim=(1, 2), keepdim=True) if is_stack else tensor.abs().max()
    scale = (largest / 448).bfloat16()
    values = (tensor / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    activations = f"{name}_activation_scale" if is_stack else f"{name.removesuffix('weight')}activation_scale"
    return {name: values, f"{name}_scale_inv": scale, activations: torch.ones(scale.numel())}


def save_full(directory: Path, **changes: Any) -> None:
    """Save a tiny model in full. ``changes``: fields of its text's configuration."""
    saved("mistral3", directory, **{**MORE["mistral4"], "model_type": "mistral4", **changes})


def save_published(directory: Path, **changes: Any) -> None:
    """Save a tiny model. ``changes``: as for ``save_full``."""
    save_full(directory, **changes)
    change_tensors(directory, in_fp8)
    change_config(directory, lambda config: config.update(quantization_config=FP8))


@pytest.fixture
def published(tmp_path: Path) -> Path:
    save_published(tmp_path)
    return tmp_path


def test_both_paths_read_it(published: Path) -> None:
    """Without being asked, the one that reads images."""
    names = load_file(published / "model.safetensors")
    assert "language_model.model.layers.1.mlp.experts.gate_up_proj_scale_inv" in names
    assert outline_model(published, "auto", 16).path == "transformers"
    outline = outline_model(published, "native", 16)
    assert (outline.path, outline.has_stored) == ("native", True)
    assert [group.key_size for group in outline.geometry.groups] == [24]
    ranks = outline_model(published, "native", 16, num_ranks=2).ranks
    assert max(rank.weights_nbytes for rank in ranks) < 0.56 * outline.gpu_weights_nbytes
    check_files(published, load_config(published))
    assert compare(published, "native") < 2e-6
    assert compare(published, "transformers") < 2e-6


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("has_whole_experts", [False, True])
def test_ranks_have_their_parts_of_stacked_experts(keeps: bool, has_whole_experts: bool, published: Path) -> None:
    config, cpu = load_config(published), torch.device("cpu")

    def experts(cut: Cut, *, keeps: bool) -> list[torch.Tensor]:
        """Of a layer, ``[experts, gate and up and down's columns, hidden]``."""
        weights = load_weights(published, config, torch.float32, cpu, lambda *_: None, None, cut, lambda _: keeps)
        sparse: Any = weights.layers[1].mlp
        assert isinstance(sparse, SparseWeights)
        found = sparse.experts
        assert isinstance(found.gate_up, StoredWeight) == isinstance(found.down, StoredWeight) == keeps
        full = [one.dequantised() if isinstance(one, StoredWeight) else one for one in (found.gate_up, found.down)]
        gate_up, down = (one.view(found.num_experts, -1, one.shape[1]) for one in full)
        return [*gate_up.chunk(2, dim=1), down.mT]

    whole = experts(Cut(), keeps=False)
    cuts = (Cut(rank, 2, has_whole_experts=has_whole_experts) for rank in range(2))
    halves = zip(*(experts(cut, keeps=keeps) for cut in cuts), strict=True)
    for one, parts in zip(whole, halves, strict=True):
        torch.testing.assert_close(torch.cat(parts, dim=0 if has_whole_experts else 1), one, rtol=0, atol=0)


def test_other_texts_beside_the_encoder_run_through_transformers(tmp_path: Path) -> None:
    saved("mistral3", tmp_path)
    assert outline_model(tmp_path, "auto", 16).path == "transformers"
    with pytest.raises(
        ModelError, match=r"of type 'mistral'; our forward pass for Mistral3For\w+ has mistral4: take --backend auto"
    ):
        load_config(tmp_path)


def test_a_worker_without_images_says_which_backend_reads_them(published: Path) -> None:
    assert load(published, dtype="float32").card.no_images == (
        "with --backend native the model reads text only; with auto it reads images, too"
    )


def test_a_type_that_only_the_whole_checkpoint_says_is_the_texts(published: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["dtype"], config["text_config"]["dtype"] = "bfloat16", None

    change_config(published, change)
    assert load_config(published).dtype == "bfloat16"


def test_queries_that_grow_by_nothing_known_are_refused(published: Path) -> None:
    change_config(published, lambda config: config["text_config"]["rope_parameters"].pop("llama_4_scaling_beta"))
    with pytest.raises(
        ModelError, match=r"'llama_4_scaling_beta' is None and 'original_max_position_embeddings' 16 in"
    ):
        load_config(published)


def test_adapters_may_call_layers_as_files_classes_or_a_text_alone_do(tmp_path: Path) -> None:
    """An adapter changes MLPs beside experts. By any names it gives what the merged model gives."""
    base, published = tmp_path / "base", "language_model.model."
    save_full(base)
    every = linear_shapes(base, ("gate_proj", "up_proj", "down_proj"))
    shapes = {name: shape for name, shape in every.items() if name.startswith(published)}
    write_adapter(tmp_path / "adapter", shapes)
    merge(base, tmp_path / "adapter", tmp_path / "merged")
    expected = generate(load(tmp_path / "merged", dtype="float32"), [0])
    engine = load(base, dtype="float32", adapter_bytes=1)
    is_elsewhere = in_other_stages(load_config(base), Cut(num_stages=2))
    for slot, prefix in enumerate((published, "model.language_model.", "model."), start=1):
        renamed = {name.replace(published, prefix): shape for name, shape in shapes.items()}
        ref = write_adapter(tmp_path / f"adapter-{slot}", renamed)
        slots_of(engine).load(slot, tmp_path / ref.name, ref.digest)
        assert generate(engine, [slot]) == expected != generate(engine, [0])
        assert [is_elsewhere(f"{prefix}layers.{layer}.mlp.up_proj") for layer in range(4)] == [False, False, True, True]
    both = write_adapter(tmp_path / "both", shapes | renamed)
    with pytest.raises(AdapterError, match=r"model\.layers\.0\.mlp\.down_proj is another name of a layer that it also"):
        slots_of(engine).load(4, tmp_path / "both", both.digest)
