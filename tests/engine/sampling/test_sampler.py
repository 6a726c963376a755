"""The whole sampler: rows of all kinds in one batch, log probabilities, noise. Other files test its steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvrelay.common.sampling import Watermark
from kvrelay.engine.step.sequence import Sequence
from tests.engine.conftest import sequence, tokens
from tests.engine.sampling.rig import run
from tests.engine.sampling.test_logits import Allows


def test_the_token_depends_on_seed_choice_and_position() -> None:
    logits = torch.zeros(1, 50_000)
    seen = {
        run(logits, [sequence([0] * length, [], temperature=1.0, seed=seed, choice=choice)])[0].token_id
        for length in (1, 2, 3)
        for seed in (0, 1, 2**32, 2**63 + 1, 2**64 - 1)
        for choice in (0, 1, 2**31 - 1)
    }
    assert len(seen) == 45


def test_greedy_takes_the_likeliest_and_needs_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.engine.sampling.rows.uniforms", None)
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(3))
    results = run(logits, [sequence([0], []) for _ in range(5)])
    assert [token.token_id for token in results] == logits.argmax(-1).tolist()
    assert results[0].logprob is None


def test_penalties_act_before_the_choice_and_leave_logprobs_raw() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    of = sequence([0, 1], [], presence_penalty=2.0, num_logprobs=2)
    of.num_prompt_tokens = 1
    (result,) = run(logits, [of])
    raw = torch.log_softmax(logits[0], dim=-1)
    assert result.token_id == 2
    assert result.logprob == pytest.approx(raw[2].item())
    assert [token for token, _ in result.top_logprobs] == [1, 2]


def test_logprobs_only_for_rows_that_ask_and_as_many_as_they_ask_for() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(6))
    asked = [None, 0, 3, 99]
    results = run(logits, [sequence([0], [], num_logprobs=count, temperature=2.0) for count in asked])
    raw = torch.log_softmax(logits, dim=-1)
    assert results[0].logprob is None
    assert [len(result.top_logprobs) for result in results] == [0, 0, 3, 30]
    for row in (1, 2, 3):
        assert results[row].logprob == pytest.approx(raw[row, results[row].token_id].item(), abs=1e-6)
    assert [value for _, value in results[2].top_logprobs] == pytest.approx(raw[2].topk(3).values.tolist())


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 20},
    {"temperature": 1.2, "top_p": 0.8, "choice": 3},
    {"temperature": 1.0, "min_p": 0.1, "num_logprobs": 3},
    {"temperature": 1.0, "typical_p": 0.5},
    {"repetition_penalty": 1.8},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "temperature": 0.9},
    {"logit_bias": ((5, 4.0), (6, -4.0)), "num_logprobs": 0},
    {"allowed_token_ids": tuple(range(0, 150, 3)), "temperature": 1.5},
    {"bad_words": ((7,), (1, 2, 3)), "temperature": 1.0, "choice": 1},
    {"min_tokens": 500, "stop_token_ids": (2, 3, 4)},
    {"watermark": Watermark(gamma=0.25, delta=3.0)},
    {"watermark": Watermark(), "temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9},
    {"processors": ("half", "no-odd"), "temperature": 0.8},
    {"guide": True, "temperature": 1.0, "processors": ("no-odd",), "logit_bias": ((8, 9.0),)},
]


def test_sixteen_different_settings_get_the_same_tokens_alone_and_together() -> None:
    def no_odd(logits: torch.Tensor, token_ids: Any) -> None:
        logits[:, 1::2] = -torch.inf

    processors = {"half": lambda logits, token_ids: logits.mul_(0.5), "no-odd": no_odd}

    def rows(length: int) -> list[Sequence]:
        made = []
        for row, settings in enumerate(SETTINGS):
            guide = Allows(*range(0, 40, 4)) if settings.get("guide") else None
            sampling = {name: value for name, value in settings.items() if name != "guide"}
            of = sequence(tokens(row, 4 + length), [], **{"seed": row * 31 - 7, **sampling})
            of.num_prompt_tokens = 4
            of.guide = guide
            made.append(of)
        return made

    assert len(SETTINGS) == 16
    differs = 0
    for length in range(8):
        for dtype in (torch.float32, torch.bfloat16):
            generator = torch.Generator().manual_seed(length)
            logits = (torch.randn(16, 199, generator=generator) * 3).to(dtype)
            together = run(logits, rows(length), processors)
            assert run(logits.flip(0), rows(length)[::-1], processors) == together[::-1]
            alone = [run(logits[row : row + 1], [of], processors)[0] for row, of in enumerate(rows(length))]
            assert alone == together
            plain = logits.argmax(dim=-1).tolist()
            differs += sum(token.token_id != other for token, other in zip(together, plain, strict=True))
    assert differs > 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_greedy_guided_row_takes_the_first_of_the_likeliest_that_its_guide_allows(dtype: torch.dtype) -> None:
    logits = (torch.randn(6, 90, generator=torch.Generator().manual_seed(8)) * 2).round().to(dtype)  # many are equal
    logits[4, 20:] = -torch.inf  # all tokens that its guide allows
    allowed = [tuple(range(row, 90, 7)) for row in range(4)] + [(50, 51, 89)]
    guided = [sequence([1], [], num_logprobs=2 if row == 2 else None) for row in range(6)]
    for of, token_ids in zip(guided, allowed, strict=False):
        of.guide = Allows(*token_ids)
    results = run(logits, guided)
    for row, token_ids in enumerate(allowed[:4]):
        assert results[row].token_id == max(token_ids, key=lambda token: (float(logits[row, token]), -token))
    assert results[5].token_id == int(logits[5].float().argmax())
    raw = torch.log_softmax(logits[2].float(), dim=-1)
    assert results[2].logprob == pytest.approx(float(raw[results[2].token_id]))  # the raw one, without the guide
    with_bias = [sequence([1], [], logit_bias=((5, 0.0),)) for _ in range(6)]  # a bias, so that the fp32 path is used
    for of, token_ids in zip(with_bias, allowed, strict=False):
        of.guide = Allows(*token_ids)
    assert [token.token_id for token in run(logits, with_bias)] == [token.token_id for token in results]
