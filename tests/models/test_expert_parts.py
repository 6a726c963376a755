"""Ranks read their parts of experts matrix by matrix: the same numbers as of the whole, and no whole layer of experts in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.engine.config.cut import Cut
from kvrelay.engine.models.hf.expert_parts import NO_EXPERTS, ExpertParts, find_expert_parts
from kvrelay.engine.models.hf.loading import load_outline, load_parameters
from kvrelay.engine.models.hf.outline import NoWeights
from kvrelay.engine.models.hf.ranks.cuts import Cuts, find_cuts

from .test_parameters import CPU, Alive
from .test_quantised import FORMATS, stored
from .test_types import saved

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out
NUM_EXPERTS, WIDTH = 32, 64
SIZES = {
    "n_routed_experts": NUM_EXPERTS,
    "num_local_experts": NUM_EXPERTS,
    "num_experts": NUM_EXPERTS,
    "moe_intermediate_size": WIDTH,
    "num_hidden_layers": 2,
}


def found(directory: Path, dtype: torch.dtype, rank: int = 1) -> tuple[ExpertParts, Cuts]:
    """What one of two ranks reads."""
    outline = load_outline(directory, dtype, traces_experts=True)
    with NoWeights():
        cuts = find_cuts(outline, Cut(rank, 2))
    return find_expert_parts(outline.model, cuts, ()), cuts


def expect_parts_of_the_whole(directory: Path, dtype: torch.dtype, experts: ExpertParts, cuts: Cuts) -> Any:
    """The model whose parts are read, beside one that transformers reads whole before it is cut."""
    model, expected = (
        load_parameters(directory, dtype, CPU, keep=cuts.of, experts=one) for one in (experts, NO_EXPERTS)
    )
    theirs = dict(expected.named_parameters())
    assert [name for name, _ in model.named_parameters()] == list(theirs)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == theirs[name].dtype, name
        assert parameter.is_contiguous(), name
        assert torch.equal(parameter, theirs[name]), name
    return model


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("model_type", ["deepseek_v3", "mixtral", "minimax_m2", "qwen3_5_moe_text", "phimoe"])
def test_parts_that_are_read_are_those_of_the_whole(model_type: str, rank: int, tmp_path: Path) -> None:
    """In bf16, which a float32 checkpoint is converted to."""
    saved(model_type, tmp_path)
    experts, cuts = found(tmp_path, torch.bfloat16, rank)
    model = expect_parts_of_the_whole(tmp_path, torch.bfloat16, experts, cuts)
    stacks = {path for path in cuts.parameters if path.rpartition(".")[0] in cuts.experts}
    assert experts.origins.keys() == stacks, "parameters of experts are read whole"
    assert len(stacks) >= 2
    assert all(not parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("model_type", ["llama4_text", "aria_text"])
def test_experts_in_one_tensor_are_sliced_by_transformers(model_type: str, tmp_path: Path) -> None:
    saved(model_type, tmp_path)
    experts, cuts = found(tmp_path, torch.float32)
    assert not experts.origins
    assert not experts.sources
    expect_parts_of_the_whole(tmp_path, torch.float32, experts, cuts)


@pytest.mark.parametrize(("model_type", "weight_format"), [("deepseek_v3", "ct-fp8"), ("glm4_moe", "fp8-blocks")])
def test_stored_experts_are_expanded_part_by_part(model_type: str, weight_format: str, tmp_path: Path) -> None:
    saved(model_type, tmp_path / "full", **SIZES)
    directory = stored(tmp_path / "full", tmp_path / "stored", FORMATS[weight_format])
    experts, cuts = found(directory, torch.float32)
    assert experts.origins
    expect_parts_of_the_whole(directory, torch.float32, experts, cuts)


def test_no_rank_holds_more_of_experts_than_its_part_and_a_matrix(tmp_path: Path) -> None:
    saved("deepseek_v3", tmp_path, **SIZES)
    experts, cuts = found(tmp_path, torch.float32)
    with Alive(tmp_path) as alive:
        model = load_parameters(tmp_path, torch.float32, CPU, keep=cuts.of, experts=experts)
    parts = dict(model.named_parameters())
    stacks = [parts[path].nbytes for path in experts.origins]
    beside = 2 * max(one.nbytes for path, one in parts.items() if path not in experts.origins)
    assert beside < min(stacks), "the bound would not tell a whole stack from a matrix"
    assert alive.peak <= sum(one.nbytes for one in parts.values()) + beside


def test_progress_counts_the_experts(tmp_path: Path) -> None:
    saved("deepseek_v3", tmp_path, **SIZES)
    experts, cuts = found(tmp_path, torch.float32)
    heard: list[tuple[int, int]] = []
    load_parameters(tmp_path, torch.float32, CPU, lambda *one: heard.append(one), keep=cuts.of, experts=experts)
    assert heard == sorted(heard)
    (total,) = {of for _, of in heard}
    of_experts = sum(0.1 * total < done < total for done, _ in heard)
    assert experts.share > 0.5
    assert of_experts >= len(experts.origins) - 1
    assert heard[-1] == (total, total)
