"""Several ranks and stages with the real scheduler: random requests get the tokens that one rank gives them alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from kvrelay.common.sampling import SamplingParams, Watermark
from kvrelay.engine.step.interface import Engine
from tests.decode_worker.rig import Rig, beams, greedy
from tests.decode_worker.workload import Wish, assert_as_alone
from tests.engine.conftest import SIZES, VOCAB, load, save_model
from tests.engine.ranks.conftest import load_ranks

NUM_BLOCKS = 80
HEADS = {**SIZES, "num_attention_heads": 12}

FAMILIES: dict[str, tuple[Any, int] | tuple[Any, int, int]] = {  # and how many ranks, in how many stages
    "llama-2": (transformers.LlamaConfig(**{**HEADS, "num_key_value_heads": 4}), 2),
    "llama-tied-one-kv-head-3": (
        transformers.LlamaConfig(**{**HEADS, "num_key_value_heads": 1, "tie_word_embeddings": True}), 3
    ),
    "llama-biases-two-kv-heads-4": (
        transformers.LlamaConfig(**{**HEADS, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}), 4
    ),
    "gpt-oss-windows-whole-experts-3": (
        transformers.GptOssConfig(
            **{**HEADS, "num_key_value_heads": 3}, num_local_experts=5, num_experts_per_tok=2, attention_bias=True,
            sliding_window=19, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        3,
    ),
    "llama-tied-in-2-stages": (transformers.LlamaConfig(**{**HEADS, "tie_word_embeddings": True}), 1, 2),
    "gpt-oss-windows-in-3-stages": (
        transformers.GptOssConfig(
            **HEADS, num_local_experts=5, num_experts_per_tok=2, attention_bias=True, sliding_window=19,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        1, 3,
    ),
    "mixtral-2-in-2-stages": (
        transformers.MixtralConfig(
            **{**HEADS, "num_key_value_heads": 4}, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
        ),
        2, 2,
    ),
    "glm-4.5-2-in-2-stages": (
        transformers.Glm4MoeConfig(
            **{**HEADS, "num_key_value_heads": 4, "rope_parameters": dict(SIZES["rope_parameters"])}, moe_intermediate_size=32,
            n_routed_experts=4, num_experts_per_tok=2, attention_bias=True, use_qk_norm=True,
        ),
        2, 2,
    ),
    "deepseek-v3-in-2-stages": (
        transformers.DeepseekV3Config(
            **{**HEADS, "num_key_value_heads": 12, "head_dim": 8}, moe_intermediate_size=32, n_routed_experts=4,
            n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, kv_lora_rank=16,
            q_lora_rank=None, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
        ),
        1, 2,
    ),
    "glm-5-picks-2": (
        transformers.GlmMoeDsaConfig(
            **{**HEADS, "num_key_value_heads": 12, "head_dim": 8}, moe_intermediate_size=32, n_routed_experts=4,
            n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=24,
            qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, index_topk=8, index_head_dim=16, index_n_heads=4,
            indexer_types=["full", "full", "shared"],
        ),
        2,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Engine]]:
    """The same model on several ranks and on one rank."""
    config, num_ranks, *num_stages = FAMILIES[request.param]
    directory: Path = tmp_path_factory.mktemp("model")
    save_model(directory, config)
    ranked = load_ranks(
        directory, num_ranks, num_stages=sum(num_stages) or 1, num_blocks=NUM_BLOCKS, block_size=8, run_ahead="on", dtype="float32",
        expert_parallel="whole-experts" in request.param,
    )  # fmt: skip
    yield ranked, load(directory, num_blocks=NUM_BLOCKS, block_size=8, run_ahead="off", dtype="float32")
    ranked.close()


def sampling(draws: random.Random) -> SamplingParams:
    """Random sampling without processors and beams. Often few tokens are allowed, so that penalties meet repeated ones."""
    few = tuple(sorted(draws.sample(range(VOCAB), draws.choice((4, 9)))))
    return SamplingParams(
        max_tokens=draws.randint(1, 30),
        temperature=draws.choice((0.0, 0.0, 0.7, 1.5)),
        seed=draws.randrange(2**32),
        top_k=draws.choice((0, 0, 12)),
        repetition_penalty=draws.choice((1.0, 1.3)),
        frequency_penalty=draws.choice((0.0, 0.6)),
        allowed_token_ids=draws.choice(((), few, few)),
        logit_bias=draws.choice(((), ((few[0], 6.0), (few[1], 5.5)))),
        bad_words=draws.choice(((), ((few[2],), (few[0], few[1])))),
        watermark=draws.choice((None, None, None, Watermark(delta=6.0))),
        num_logprobs=draws.choice((None, None, 2)),
    )


def test_every_request_gets_the_tokens_that_one_rank_gives_it(engines: tuple[Engine, Engine]) -> None:
    """Random requests, some with guides, run in chunks and batches, in a small pool whose free blocks are overwritten."""
    ranked, one_rank = engines
    draws = random.Random(0)
    rig = Rig(ranked, draws.choice((12, 20)), max_num_seqs=6, max_batched_tokens=16)
    wanted = {}
    for index in range(6):
        name, prompt = f"r{index}", [draws.randrange(VOCAB) for _ in range(draws.randint(1, 40))]
        wanted[name] = Wish(prompt, sampling(draws), handed_over=False, guided=draws.choice((0, 0, 5, 40)))
        wanted[name].add_to(rig, name)
        for _ in range(draws.randint(0, 6)):
            rig.step()
            rig.let_go()
            rig.scribble(draws.randint(1, 5))
    rig.let_go()
    rig.run()
    assert max(rig.engine.depths) == max(1, ranked.num_stages - 1), "no step was launched while another one ran"
    assert_as_alone(rig, {name: wish.alone(Rig(one_rank), name) for name, wish in wanted.items()})


def test_beams_copy_blocks_on_every_rank(engines: tuple[Engine, Engine]) -> None:
    found = []
    for engine in engines:
        rig = Rig(engine)
        rig.add("beams", list(range(3, 30)), beams(4, 16, stops=tuple(range(0, VOCAB, 9))), handed_over=False)
        rig.add("other", [4, 5, 6], greedy(20), handed_over=False)
        found.append(rig.run())
        assert rig.engine.num_copies
    assert found[0] == found[1]
