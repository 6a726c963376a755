"""Models of transformers on several ranks: the same tokens as on one rank, or a refusal by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvrelay.common.errors import ModelError
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.config.cut import Cut
from kvrelay.engine.models.hf.check import LONGEST
from kvrelay.engine.models.ranks import RankPart
from kvrelay.engine.step.sequence import Sequence
from kvrelay.engine.torch_engine import TorchEngine
from kvrelay.engine.transformers_engine import load_transformers_engine
from tests.engine.conftest import assert_same_tokens
from tests.engine.ranks.conftest import load_ranks
from tests.engine.ranks.rig import ROUNDING

from .test_images import PlayedRanks
from .test_kernels import Run, relayed
from .test_types import BLOCK_SIZE, NUM_BLOCKS, engine_of, options_of, saved
from .tiny import VOCAB

# Softcaps, biases, an MLP of two products, parallel layers, and one product for queries, keys and values.
SERVED = ("llama", "gemma2", "starcoder2", "cohere2", "gpt_neox", "exaone4")
# Heads of unequal size, layers that share K/V, partly rotated heads, layers without positions, an encoder of images.
MORE = ("gemma4_text", "phi", "smollm3", "mistral3")


@pytest.mark.parametrize("model_type", [*SERVED, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)])
def test_two_ranks_give_the_tokens_of_one(model_type: str, tmp_path: Path) -> None:
    saved(model_type, tmp_path)
    one = engine_of(tmp_path)
    two: Any = load_ranks(
        tmp_path, 2, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, backend="transformers", dtype="float32"
    )
    try:
        assert two.card.layout.geometry == one.card.layout.geometry
        expected = list(relayed(Run(one), Run(engine_of(tmp_path))))
        for prefill, decode in ((two, one), (one, two)):  # blocks are handed over in between
            for given, tokens in zip(relayed(Run(prefill), Run(decode)), expected, strict=True):
                assert_same_tokens(given, tokens, ROUNDING)
    finally:
        two.close()


@pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out
def test_two_ranks_scale_queries_by_position(tmp_path: Path) -> None:
    """Llama 4 does so only after more tokens than the check at load computes."""
    floor_scale = LONGEST + 9
    saved("llama4_text", tmp_path, moe_layers=[], floor_scale=floor_scale)
    one = engine_of(tmp_path)
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


def test_ranks_have_query_heads_and_all_latents(tmp_path: Path) -> None:
    saved("deepseek_v3", tmp_path)
    one = TorchEngine.load(options_of(tmp_path), lambda *_: None)
    two: Any = load_ranks(tmp_path, 2, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype="float32")
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
        (
            "phi3",
            2,
            r"self_attn\.o_proj of Phi3ForCausalLM is cut by rowwise_split_input, which is not served yet",
        ),
        ("qwen3_moe", 2, r"model\.layers\.\d\.mlp\.experts of Qwen3MoeForCausalLM is cut by moe_tp_experts"),
        ("llama", 4, "has 2, 4 heads in its layers, which fit 1, 2 ranks"),
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
