"""The cost of steps, learned from steps that are disturbed, alike or few."""

from __future__ import annotations

import random

import pytest

from kvrelay.worker.scheduling.step_cost import MixedSteps, StepCost, StepCosts, budget_beside, tokens_beside


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
    """Tokens become dearer, as the later tokens of a long prompt do. The cost of a whole step is learned right."""
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
    assert learned([(512, 5.0), (512, 0.1)]) is None  # the first step is slow, as if it compiled
    assert learned([(512, 0.0)] * 50) is None
    cost = learned([(512, 5.0), (512, 0.1), (512, 0.1)])
    assert cost == StepCost(0.0, 0.1 / 512)


def test_a_step_whose_size_does_not_matter_has_a_cost_for_its_tokens_all_the_same() -> None:
    cost = learned([(num_tokens, 0.05) for num_tokens in (16, 512, 64, 128)] * 4)
    assert cost is not None
    assert cost.token_s > 0


def test_the_speed_is_all_tokens_by_all_seconds_of_the_latest_steps() -> None:
    costs = StepCosts()
    assert costs.tokens_per_s is None
    for _ in range(100):
        costs.observe(512, 0.5)
    assert costs.tokens_per_s == pytest.approx(1024)
    for _ in range(100):
        costs.observe(512, 1.0)
    assert costs.tokens_per_s == pytest.approx(512)


def test_prompts_in_small_steps_take_longer() -> None:
    cost = StepCost(0.01, 1e-4)
    assert cost.seconds(1000, 100) == pytest.approx(0.2)
    assert cost.seconds(1000, 500) == pytest.approx(0.12)


def test_a_step_takes_its_budget_whatever_tokens_and_other_sequences_cost() -> None:
    """The number of sequences and the cost of a token change. Steps keep the budget, and few of them run without prompts."""
    steps = MixedSteps(None, 512, "cpu")
    took: list[float] = []
    for number in range(600):
        num_generating, fixed_s, token_s = (4, 0.01, 2e-4 + 1e-6 * (number % 100)) if number < 300 else (16, 0.03, 4e-5)
        num_tokens, others_s = steps.prompt_tokens(num_generating), fixed_s + 0.002 * num_generating
        step_s = others_s + token_s * num_tokens
        steps.observe(num_tokens, num_generating, step_s)
        if number % 300 > 120:  # by then the change must be learned
            took.append(step_s / others_s)
    bare = [ratio for ratio in took if ratio == 1.0]
    assert len(took) / 40 < len(bare) < len(took) / 25
    assert all(1.25 < ratio < 1.5 for ratio in took if ratio != 1.0)


def test_sequences_that_join_are_no_cost_of_prompts() -> None:
    """Sequences join one by one while prompts wait. Each step allows for the time of all sequences that generate in it."""
    steps = MixedSteps(None, 512, "cpu")
    for num_generating in (1, 2, 4, 8, 16, 8, 4, 2, 1):
        steps.observe(0, num_generating, 0.01 + 0.002 * num_generating)
    for num_generating in range(1, 33):
        num_tokens, others_s = steps.prompt_tokens(num_generating), 0.01 + 0.002 * num_generating
        step_s = others_s + 3e-4 * num_tokens
        steps.observe(num_tokens, num_generating, step_s)
        assert num_generating < 4 or num_tokens == 0 or 1.3 < step_s / others_s < 1.45


@pytest.mark.parametrize(
    ("budget_s", "num_tokens"),
    [
        (None, 12),  # 0.4 of 31 ms / 1 ms
        (0.05, 19),
        (0.01, 7),  # a quarter of 31 ms: the least that prompts get, whatever the budget
    ],
)
def test_prompts_get_what_a_budget_leaves(budget_s: float | None, num_tokens: int) -> None:
    assert tokens_beside(0.031, 0.031, 1e-3, budget_s) == num_tokens
    assert tokens_beside(0.0, 0.0, 1e-3, 1e-9) == 1


def test_prompts_that_wait_count_as_if_they_generated() -> None:
    """Four sequences generate in 18 ms, and 16 would in 42 ms. A set budget stays as it is."""
    token_s, steps, bounded = 1e-4, MixedSteps(None, 1000, "cpu"), MixedSteps(0.025, 1000, "cpu")
    for one in (steps, bounded):
        for num_generating in (2, 4, 8, 4) * 8:
            one.observe(0, num_generating, 0.01 + 0.002 * num_generating)
        for num_tokens in (32, 40, 50, 62, 77, 96, 120, 150, 187, 233, 291, 363, 453):
            one.observe(num_tokens, 4, 0.018 + token_s * num_tokens)
    num_tokens = {num_behind: steps.prompt_tokens(4, num_behind) for num_behind in (0, 4, 12)}
    assert num_tokens == {0: pytest.approx(72, abs=1), 4: pytest.approx(184, abs=2), 12: pytest.approx(408, abs=4)}
    assert {bounded.prompt_tokens(4, num_behind) for num_behind in (0, 4, 12)} == {70}
    speeds = [steps.tokens_per_s(4, num_behind) for num_behind in (0, 12)]
    assert speeds == [pytest.approx(72 / 0.0252, rel=0.02), pytest.approx(408 / 0.0588, rel=0.02)]
    # Steps of one size alone say little of larger ones, and nothing says that a sequence costs more than those there are.
    lone = MixedSteps(None, 1000, "cpu")
    for _ in range(20):
        lone.observe(0, 4, 0.018)
    for num_tokens in (32, 40, 50, 62, 77, 96, 120, 150, 187, 233, 291, 363, 453, 566, 707, 883):
        lone.observe(num_tokens, 4, 0.018 + token_s * num_tokens)
    assert 72 < lone.prompt_tokens(4, 12) < 1.4 * 4 * 180 - 180


def test_nobody_sees_a_fast_device_take_ten_milliseconds() -> None:
    assert budget_beside(0.002, None) == pytest.approx(0.01)
    assert budget_beside(0.02, None) == pytest.approx(0.028)
    assert budget_beside(0.02, 0.005) == 0.005


@pytest.mark.parametrize(("device_type", "least"), [("cuda", 64), ("cpu", 8)])
def test_chunks_do_not_shrink_to_what_they_cost_whatever_is_in_them(device_type: str, least: int) -> None:
    """Any prompt tokens add 4 ms to a step, so smaller chunks make tokens dearer. Chunks keep a least size all the same."""
    steps = MixedSteps(None, 512, device_type)
    for _ in range(20):
        steps.observe(0, 8, 0.0065)
    for _ in range(200):
        if num_tokens := steps.prompt_tokens(8):
            assert num_tokens >= min(least, 32)
            steps.observe(num_tokens, 8, 0.0105 + 2e-5 * num_tokens)
        else:
            steps.observe(0, 8, 0.0065)
    assert steps.tokens_per_s(8) == pytest.approx(least / (0.0105 + 2e-5 * least), rel=0.05)


def test_a_sequence_that_costs_a_step_half_its_time_is_no_cost_of_prompts_before_it_nor_after() -> None:
    """A fifth sequence costs much more than the others, as where a matrix product changes its kernel. Steps keep the budget."""
    steps = MixedSteps(None, 512, "cpu")
    took_s = {4: 0.014, 5: 0.022}
    for num_generating in [4] * 8 + [5] * 8 + [4] * 8:
        steps.observe(0, num_generating, took_s[num_generating])
    ratios = []
    for number in range(64):
        num_generating = 4 + number // 8 % 2
        num_tokens = steps.prompt_tokens(num_generating)
        step_s = took_s[num_generating] + 3e-4 * num_tokens
        steps.observe(num_tokens, num_generating, step_s)
        ratios.append(step_s / took_s[num_generating])
    assert all(ratio < 1.45 for ratio in ratios[3:])


def test_steps_that_a_prompts_arrival_disturbs_do_not_make_its_chunks_longer() -> None:
    """A prompt's arrival slows the last steps without prompts. Later steps with its chunks must still keep the budget."""
    steps = MixedSteps(None, 512, "cpu")
    for _ in range(3):
        for number in range(60):
            steps.observe(0, 4, 0.014 if number < 57 else 0.021)
        for _ in range(60):
            num_tokens = steps.prompt_tokens(4)
            step_s = 0.014 + 2e-4 * num_tokens
            steps.observe(num_tokens, 4, step_s)
            assert step_s < 1.5 * 0.014


def test_what_tokens_cost_is_approached() -> None:
    steps = MixedSteps(10.0, 4096, "cpu")
    while (num_tokens := steps.prompt_tokens(4)) == 0 or steps.tokens_per_s(4) is None:
        assert num_tokens <= 32
        steps.observe(num_tokens, 4, 0.01 + 1e-9 * num_tokens)
    sizes = []
    for _ in range(6):
        sizes.append(steps.prompt_tokens(4))
        steps.observe(sizes[-1], 4, 0.01 + 1e-9 * sizes[-1])  # tokens seem to cost nothing
    assert sizes == [40, 50, 62, 77, 96, 120]


def test_a_clock_that_stands_still_lets_prompts_move_on() -> None:
    steps = MixedSteps(None, 512, "cpu")
    for _ in range(100):
        assert steps.prompt_tokens(4) == 32
        steps.observe(32, 4, 0.0)


def test_without_a_bound_or_anybody_who_generates_prompts_have_whole_steps() -> None:
    assert MixedSteps(0.0, 512, "cpu").prompt_tokens(4) == 512
    assert MixedSteps(None, 512, "cpu").prompt_tokens(0) == 512


def busy(budget_s: float | None) -> MixedSteps:
    """Steps of four sequences that take 20 ms, and 0.5 ms more for each prompt token."""
    steps = MixedSteps(budget_s, 512, "cpu")
    for _ in range(10):
        steps.observe(0, 4, 0.02)
    for _ in range(10):
        steps.observe(20, 4, 0.03)
    return steps


@pytest.mark.parametrize(
    ("budget_s", "tokens_per_s"),
    [(None, 16 / 0.028), (0.04, 40 / 0.04), (0.02, 0.0), (0.005, 0.0), (0.0, 512 / 0.276)],
)
def test_the_speed_is_what_the_budget_leaves(budget_s: float | None, tokens_per_s: float) -> None:
    assert busy(budget_s).tokens_per_s(4) == pytest.approx(tokens_per_s, rel=0.07)


def test_the_speed_of_an_idle_worker_is_that_of_whole_steps() -> None:
    steps = MixedSteps(None, 512, "cpu")
    assert steps.tokens_per_s(0) is None
    for num_tokens in (512, 300, 512, 512):
        steps.observe(num_tokens, 0, 0.01 + 4e-4 * num_tokens)
    assert steps.tokens_per_s(0) == pytest.approx(512 / 0.2148, rel=0.01)
    assert steps.tokens_per_s(4) is None, "what the four take is not known"
    assert busy(None).tokens_per_s(0) == pytest.approx(2000), "by what tokens add to others' steps"
