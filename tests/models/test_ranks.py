"""Models of transformers on several ranks: the same tokens as on one rank, or a refusal by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.common.errors import ModelError
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.config.cut import Cut
from kvrelay.engine.models.hf.check import LONGEST
from kvrelay.engine.models.hf.gate import probe_layers
from kvrelay.engine.models.hf.model import TransformersModel, shape_of
from kvrelay.engine.models.hf.ranks.cut import require_plan
from kvrelay.engine.models.hf.ranks.cuts import find_cuts
from kvrelay.engine.models.ranks import RankPart
from kvrelay.engine.step.sequence import Sequence
from kvrelay.engine.torch_engine import TorchEngine
from kvrelay.engine.transformers_engine import load_transformers_engine
from tests.engine.conftest import assert_same_tokens
from tests.engine.ranks.conftest import load_ranks
from tests.engine.ranks.rig import ROUNDING

from .played_ranks import ThreadedRanks
from .test_images import PlayedRanks
from .test_kernels import Run, relayed
from .test_types import BLOCK_SIZE, EQUAL, NUM_BLOCKS, PAGE, again, options_of, saved
from .tiny import VOCAB

pytestmark = pytest.mark.long
TOLERANCE = 2e-4  # of log probabilities; some types sum over many experts
# In processes of their own: experts beside recurrent layers, whose states ranks divide, and whole attention.
IN_PROCESSES = ("qwen3_next", "olmo2")
# Biases, an MLP of two products, one product for queries, keys and values; experts, also transposed; gate and up in one layer,
# latents, sinks, experts without parameters, heads of unequal size.
KINDS = (
    "starcoder2",
    "gpt_neox",
    "glm4_moe",
    "aria_text",
    "phi3",
    "glm4_moe_lite",
    "mimo_v2_flash",
    "longcat_flash",
    "gemma4_text",
)
CHANGES = {"nemotron_h": {"layer_types": ["linear_attention", "full_attention", "moe", "mlp"]}}
_REFUSED = PAGE.partition("has no plan to cut it: ")[2].partition("\n- ")[0]
REFUSED = frozenset(re.findall(r"`([a-z0-9_-]+)`", _REFUSED))


@pytest.mark.parametrize("model_type", IN_PROCESSES)
@pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out
def test_two_ranks_give_the_tokens_of_one(model_type: str, tmp_path: Path) -> None:
    saved(model_type, tmp_path)
    two: Any = load_ranks(
        tmp_path, 2, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, backend="transformers", dtype="float32"
    )
    try:
        expect_tokens_of_one(two, tmp_path)
    finally:
        two.close()


def expect_tokens_of_one(several: Any, directory: Path, bound: float = ROUNDING) -> None:
    """Blocks are handed over in between, from several ranks to one and back. The model was checked when these were loaded."""
    one = again(directory)
    assert several.card.layout.geometry == one.card.layout.geometry
    expected = list(relayed(Run(one), Run(again(directory))))
    for prefill, decode in ((several, one), (one, several)):
        for given, tokens in zip(relayed(Run(prefill), Run(decode)), expected, strict=True):
            assert_same_tokens(given, tokens, bound)


def types() -> list[Any]:
    """All types that are served. Those outside ``KINDS`` run in make test-all only."""
    return [name if name in KINDS else pytest.param(name, marks=pytest.mark.full) for name in sorted(EQUAL)]


@pytest.mark.parametrize("model_type", types())
@pytest.mark.filterwarnings("ignore")
def test_a_type_runs_on_two_ranks_or_is_refused(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page names those that are refused."""
    saved(model_type, tmp_path, **CHANGES.get(model_type, {}))
    if model_type in REFUSED:
        with pytest.raises(ModelError, match="transformers has no plan to cut"):
            require_plan(tmp_path, 2)
        return
    with ThreadedRanks(tmp_path, 2, monkeypatch) as two:
        expect_tokens_of_one(two, tmp_path, TOLERANCE)


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", pytest.param("mimo_v2_flash", marks=pytest.mark.full)])
@pytest.mark.filterwarnings("ignore")
def test_ranks_share_heads_and_have_uneven_columns(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks, two K/V heads. Of 36 columns of each expert the last rank has 12, and others have 8."""
    model = saved(model_type, tmp_path, moe_intermediate_size=36)
    assert 36 in {one.shape[-1] for name, one in model.named_parameters() if name.endswith("experts.down_proj")}
    with ThreadedRanks(tmp_path, 4, monkeypatch) as four:
        assert {group.num_kv_heads for group in four.ranks[3].own_geometry.groups} == {1}
        expect_tokens_of_one(four, tmp_path)


def test_a_rank_has_its_columns_of_each_half(tmp_path: Path) -> None:
    """Of experts, and of an MLP whose gate and up are one layer."""
    for model_type, path, columns in (
        ("glm4_moe", "model.layers.3.mlp.experts.gate_up_proj", 1),
        ("phi3", "model.layers.3.mlp.gate_up_proj.weight", 0),
    ):
        model = saved(model_type, tmp_path / model_type)
        whole = dict(model.named_parameters())[path].detach()
        layers = probe_layers(model)
        cuts = [
            find_cuts(TransformersModel(model, layers, shape_of(model, layers, torch.float32)), Cut(rank, 2))
            for rank in range(2)
        ]
        halves = zip(*(one.of(path, whole).chunk(2, columns) for one in cuts), strict=True)
        torch.testing.assert_close(torch.cat([torch.cat(half, columns) for half in halves], columns), whole)


@pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out
def test_two_ranks_scale_queries_by_position(tmp_path: Path) -> None:
    """Llama 4 does so only after more tokens than the check at load computes."""
    floor_scale = LONGEST + 9
    saved("llama4_text", tmp_path, moe_layers=[], floor_scale=floor_scale)
    one = again(tmp_path)
    two: Any = load_ranks(
        tmp_path, 2, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, backend="transformers", dtype="float32"
    )
    try:
        expected, given = (answer(engine, list(range(3, 3 + floor_scale))) for engine in (one, two))
        assert_same_tokens(given, expected, ROUNDING)
    finally:
        two.close()


def answer(engine: TorchEngine, prompt: list[int]) -> list[SampledToken]:
    """Four tokens after ``prompt``."""
    run, num_tokens = Run(engine), len(prompt) + 4
    params = SamplingParams(max_tokens=100, temperature=0.0, num_logprobs=VOCAB)
    sequence = Sequence("r", 1, list(prompt), len(prompt), params, 0.0, block_tables=run.blocks(num_tokens))
    while sequence.num_tokens < num_tokens:
        run.step([sequence])
    return run.outputs["r"]


@pytest.mark.parametrize(
    ("model_type", "how"),
    [("mistral4", {"num_ranks": 2}), ("axk1", {"num_ranks": 2, "expert_parallel": True}),
     ("kimi_k25", {"num_ranks": 1, "num_stages": 2})],
    ids=["mistral4", "axk1 with whole experts", "kimi_k25 in stages"],
)  # fmt: skip
def test_ranks_have_query_heads_and_all_latents(model_type: str, how: dict[str, Any], tmp_path: Path) -> None:
    saved(model_type, tmp_path)
    one = TorchEngine.load(options_of(tmp_path), lambda *_: None)
    two: Any = load_ranks(tmp_path, **how, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype="float32")
    try:
        assert two.card.layout.geometry == one.card.layout.geometry
        expected = list(relayed(Run(one), Run(TorchEngine.load(options_of(tmp_path), lambda *_: None))))
        for prefill, decode in ((two, one), (one, two)):
            for given, tokens in zip(relayed(Run(prefill), Run(decode)), expected, strict=True):
                assert_same_tokens(given, tokens, ROUNDING)
    finally:
        two.close()


def test_the_smallest_pool_of_all_ranks_is_the_workers(tmp_path: Path) -> None:
    """On GPUs a rank may have less memory than others: the first one has what encodes images."""
    saved("llama", tmp_path)
    part = RankPart(Cut(), PlayedRanks(NUM_BLOCKS - 1), lambda told=b"": told, num_local=1)  # type: ignore[arg-type]
    engine = load_transformers_engine(options_of(tmp_path), lambda done, total: None, part)
    assert engine.card.num_blocks == NUM_BLOCKS - 1


@pytest.mark.parametrize(
    ("model_type", "num_ranks", "reason"),
    [
        ("gpt_oss", 2, "--tensor-parallel is 2, but transformers has no plan to cut GptOssForCausalLM: take 1"),
        ("llama", 3, "has 2, 4 heads in its layers, which fit 1, 2, 4 ranks"),
    ],
)
def test_what_cannot_be_cut_is_named(
    model_type: str, num_ranks: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights' file is missing, so the refusal comes before any weights are loaded."""
    saved(model_type, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    monkeypatch.setattr("kvrelay.engine.ranks.engine.Ranks", None)
    with pytest.raises(ModelError, match=reason):
        load_ranks(tmp_path, num_ranks, backend="transformers", dtype="float32")
