"""A draft model beside the real engine: random requests get the same tokens and log probabilities as without it."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
import transformers

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.torch_engine import TorchEngine
from tests.decode_worker.rig import Rig
from tests.decode_worker.test_run_ahead_torch import sampling, unlike_the_last
from tests.decode_worker.workload import Wish, assert_as_alone, run_disturbed
from tests.draft_models import CheckedDraftModel
from tests.draft_pairs import save_pair
from tests.engine.conftest import SIZES, VOCAB, load, save_model
from tests.guides import TokensState

NUM_BLOCKS = 80
# Our CPU kernels, which give a row the same bits in any batch.
OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "cpu_kernels": "native", "num_blocks": NUM_BLOCKS, "block_size": 8}
WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 32}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TorchEngine]:
    """A model, a shallow draft model that guesses its tokens right, and an unrelated small draft model with windows."""
    deep, shallow, strange = (tmp_path_factory.mktemp(name) for name in ("deep", "shallow", "strange"))
    save_pair(deep, shallow, 4, **WIDE)
    windows = {"sliding_window": 8, "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}
    save_model(strange, transformers.Qwen3Config(**{**SIZES, **WIDE, **windows, "use_sliding_window": True}))
    processors = {"unlike": unlike_the_last}
    return {
        "deep": load(deep, processors=processors, **OPTIONS),
        "shallow": load(shallow, **OPTIONS),
        "strange": load(strange, **{**OPTIONS, "num_blocks": 24}),
    }


@pytest.mark.parametrize("draft_model", ["deep", "shallow", "strange"])
@pytest.mark.parametrize("seed", range(2))
def test_every_request_gets_the_bits_that_it_gets_alone(
    engines: dict[str, TorchEngine], draft_model: str, seed: int
) -> None:
    """Random requests with all kinds of sampling, guides and preemptions. Their tokens and log probabilities are bit-equal."""
    draws = random.Random(seed)
    wishes: dict[str, Wish] = {}
    alone: dict[str, Rig] = {}
    for index in range(8):
        prompt, params = [draws.randrange(VOCAB) for _ in range(draws.randint(1, 60))], sampling(draws)
        params = msgspec.structs.replace(params, choice=index % 3, num_logprobs=draws.choice((None, 2)))
        name, handed_over, guided = f"r{index}", draws.random() < 0.6, draws.choice((0, 0, 0, 0, 5, 40))
        wishes[name] = Wish(prompt, params, handed_over, guided)
        alone[name] = wishes[name].alone(Rig(engines["deep"]), name)
    # The model may be its own draft model, with a second pool.
    drafter = CheckedDraftModel(
        engines[draft_model] if draft_model != "deep" else beside_itself(engines["deep"]), VOCAB
    )
    rig = Rig(
        engines["deep"],
        draws.choice((16, 24, NUM_BLOCKS)),
        drafter=drafter,
        max_num_seqs=draws.choice((5, 16, 32)),
        max_batched_tokens=draws.choice((32, 512)),
    )
    run_disturbed(rig, wishes, draws)
    drafter.assert_nothing_held()
    assert rig.drafted_by("draft-model") > 0
    assert_as_alone(rig, alone)
    for name, one in alone.items():
        assert rig.sampled.get(name, []) == one.sampled.get(name, [])


def beside_itself(engine: TorchEngine) -> TorchEngine:
    """A second engine with the same model and its own pool."""
    return load(engine._options.model_dir, **OPTIONS)


@pytest.mark.parametrize(("draft_model", "least", "most"), [("shallow", 0.95, 1.0), ("strange", 0.0, 0.2)])
def test_drafts_come_true_as_far_as_the_models_agree(
    engines: dict[str, TorchEngine], draft_model: str, least: float, most: float
) -> None:
    """Most drafts of the shallow model are accepted, also with random sampling, because both models use the same noise."""
    requests = {
        "greedy": SamplingParams(max_tokens=100, temperature=0.0),
        "random": SamplingParams(max_tokens=100, temperature=0.9, seed=5, top_p=0.9),
        "penalised": SamplingParams(
            max_tokens=100, temperature=0.7, seed=6, presence_penalty=0.4, repetition_penalty=1.2
        ),
        "biased": SamplingParams(max_tokens=100, temperature=1.0, seed=7, logit_bias=((3, 5.0),), bad_words=((4,),)),
    }
    rig = Rig(engines["deep"], drafter=CheckedDraftModel(engines[draft_model], VOCAB))
    for place, (name, params) in enumerate(requests.items()):
        rig.add(name, [1, 2, 3, 4, place], params)
    rig.add("forced", [1, 2, 3], requests["random"], guide=TokensState([*range(30, 60)]))
    rig.run()
    accepted = rig.registry.get_sample_value("kvrelay_accepted_draft_tokens_total", {"drafter": "draft-model"}) or 0
    assert least <= accepted / rig.drafted_by("draft-model") <= most
    assert (rig.drafted_by("draft-model") > 300) == (draft_model == "shallow")
