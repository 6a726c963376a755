"""What steps cost, learned from steps that are disturbed, alike, or few."""

from __future__ import annotations

import random

import pytest

from kvrelay.worker.step_cost import MixedSteps, StepCost, StepCosts, tokens_beside


def learned(steps: list[tuple[int, float]]) -> StepCost | None:
    costs = StepCosts()
    for num_tokens, step_s in steps:
        costs.observe(num_tokens, step_s)
    return costs.cost


@pytest.mark.parametrize("fixed_s", [0.0, 0.005, 0.05])
@pytest.mark.parametrize("seed", range(5))
def test_both_parts_are_learned_though_steps_are_disturbed(fixed_s: float, seed: int) -> None:
    chance = random.Random(seed)
    steps = []
    for number in range(200):
        num_tokens = chance.choice([512, 512, 512, 400, 100, 230])
        noise = 10.0 if number % 8 == 0 else chance.uniform(0.98, 1.02)
        steps.append((num_tokens, (fixed_s + 3e-4 * num_tokens) * noise))
    cost = learned(steps)
    assert cost is not None
    assert cost.token_s == pytest.approx(3e-4, rel=0.15)
    assert cost.fixed_s == pytest.approx(fixed_s, abs=0.012)


def test_steps_that_are_alike_keep_what_was_learned_of_the_fixed_part() -> None:
    costs = StepCosts()
    for num_tokens in [64, 512, 256, 128] * 5 + [512] * 100:
        costs.observe(num_tokens, 0.02 + 1e-4 * num_tokens)
    assert costs.cost is not None
    assert costs.cost.fixed_s == pytest.approx(0.02, rel=0.01)
    assert costs.cost.token_s == pytest.approx(1e-4, rel=0.01)


def test_steps_that_become_dearer_are_dearer_as_a_whole() -> None:
    """The later tokens of a long prompt look at more. Which part of a step that is in can then not be told."""
    costs = StepCosts()
    for num_tokens in [64, 512, 256, 128] * 5:
        costs.observe(num_tokens, 0.02 + 1e-4 * num_tokens)
    for _ in range(40):
        costs.observe(512, 0.02 + 2e-4 * 512)
    assert costs.cost is not None
    assert costs.cost.seconds(512, 512) == pytest.approx(0.02 + 2e-4 * 512, rel=0.01)


def test_steps_of_nearly_the_same_size_say_nothing_of_what_a_token_costs() -> None:
    costs = StepCosts()
    for _ in range(4):
        costs.observe(512, 0.02 + 3e-4 * 512)
    for _ in range(8):
        for num_tokens, noise in ((504, 1.05), (512, 0.98)) * 3:
            costs.observe(num_tokens, (0.02 + 3e-4 * num_tokens) * noise)
        costs.observe(64, 0.02 + 3e-4 * 64)
    assert costs.cost is not None
    assert costs.cost.fixed_s == pytest.approx(0.02, abs=0.005)
    assert costs.cost.token_s == pytest.approx(3e-4, rel=0.1)


def test_nothing_is_told_before_a_few_steps_nor_by_a_clock_that_stands_still() -> None:
    assert learned([]) is None
    assert learned([(512, 5.0), (512, 0.1)]) is None  # the first one compiled
    assert learned([(512, 0.0)] * 50) is None
    cost = learned([(512, 5.0), (512, 0.1), (512, 0.1)])
    assert cost == StepCost(0.0, 0.1 / 512)


def test_a_step_whose_size_does_not_matter_has_a_cost_for_its_tokens_all_the_same() -> None:
    cost = learned([(num_tokens, 0.05) for num_tokens in (16, 512, 64, 128)] * 4)
    assert cost is not None
    assert cost.token_s > 0


def test_prompts_in_small_steps_take_longer() -> None:
    cost = StepCost(0.01, 1e-4)
    assert cost.seconds(1000, 100) == pytest.approx(0.2)
    assert cost.seconds(1000, 500) == pytest.approx(0.12)


def test_a_step_takes_its_budget_whatever_tokens_and_other_sequences_cost() -> None:
    """Sequences come and go, a token's cost grows with a prompt; now and then a step shows what it takes without prompts."""
    steps = MixedSteps(None)
    took: list[float] = []
    for number in range(600):
        others_s, token_s = (0.018, 2e-4 + 1e-6 * (number % 100)) if number < 300 else (0.06, 4e-5)
        num_tokens = steps.num_tokens
        step_s = others_s + token_s * num_tokens
        steps.observe(num_tokens, 4, step_s)
        if number % 300 > 120:  # the change is known
            took.append(step_s / others_s)
    bare = [ratio for ratio in took if ratio == 1.0]
    assert len(took) / 40 < len(bare) < len(took) / 25
    assert all(1.6 < ratio < 2.5 for ratio in took if ratio != 1.0)


@pytest.mark.parametrize(
    ("budget_s", "num_tokens"),
    [
        (None, 30),  # 30 ms / 1 ms
        (0.05, 20),
        (0.01, 7),  # a quarter of 30 ms: prompts move on, whatever the budget
    ],
)
def test_prompts_get_what_a_budget_leaves(budget_s: float | None, num_tokens: int) -> None:
    assert tokens_beside(StepCost(0.03, 1e-3), budget_s) == num_tokens
    assert tokens_beside(StepCost(0.0, 1e-3), 0.0) == 1


def test_what_tokens_cost_is_approached() -> None:
    steps = MixedSteps(10.0)
    assert 0 < steps.num_tokens <= 64
    steps.observe(0, 4, 0.01)
    assert steps.num_tokens == 64
    steps.observe(64, 4, 0.01)  # as if tokens cost nothing
    assert steps.num_tokens == 256
    steps.observe(256, 4, 0.02)
    assert steps.num_tokens == 1024


def test_a_clock_that_stands_still_lets_prompts_move_on() -> None:
    steps = MixedSteps(None)
    for _ in range(100):
        assert steps.num_tokens == 64
        steps.observe(64, 4, 0.0)
