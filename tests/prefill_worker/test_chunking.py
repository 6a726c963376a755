"""Step sizes, the order of prompts, and their effect on times to first token, with random arrivals in virtual time."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

import pytest

from kvrelay.common.block_hash import HashChain
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.owners import sequence_owner
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.plan import RowResult
from kvrelay.engine.step.sequence import Sequence
from kvrelay.prefill_worker.chunking import Prompt, Turn, step_tokens, turns
from kvrelay.prefill_worker.scheduler import PrefillScheduler
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.worker.scheduling.step_cost import StepCost

BLOCK = 16
COST = StepCost(0.008, 3e-4)  # about that of the demo model on a core


@pytest.mark.parametrize(
    ("budget_s", "cost", "tokens"),
    [
        (0.0, COST, 512),  # no budget
        (1.0, None, 512),  # no cost known yet
        (10.0, COST, 512),
        (0.5, COST, 400),  # (125 ms - 8 ms) / 0.3 ms = 390 tokens
        (0.02, StepCost(0.009, 3e-4), 272),  # 9 * 9 ms / 0.3 ms = 270: the fixed part is at most a tenth of a step
        (0.02, StepCost(0.0, 3e-4), 32),
        (0.02, StepCost(0.0, 1.0), 16),
        (0.02, StepCost(1.0, 1e-5), 512),
    ],
)
def test_a_step_takes_a_quarter_of_the_budget_unless_that_is_not_worth_it(
    budget_s: float, cost: StepCost | None, tokens: int
) -> None:
    assert step_tokens(budget_s, cost, 512, BLOCK) == tokens


@pytest.mark.parametrize(
    ("cost", "largest_step", "tokens"),
    [
        (None, 0, 512),  # the first steps of a GPU, which may be slow
        (None, 512, 512),
        (StepCost(0.0, 3e-5), 512, 2048),  # the budget allows 8,333, but no such large step was measured
        (StepCost(0.0, 3e-5), 2048, 8192),
        (StepCost(0.0, 1e-3), 2048, 256),
        (StepCost(0.02, 1e-6), 16, 512),  # only small steps were measured, which say little about a token's cost
    ],
)
def test_a_large_bound_is_approached_and_a_small_cost_not_believed(
    cost: StepCost | None, largest_step: int, tokens: int
) -> None:
    assert step_tokens(1.0, cost, 8192, BLOCK, largest_step) == tokens
    assert step_tokens(0.0, cost, 8192, BLOCK, largest_step) == 8192


@pytest.mark.parametrize(("token_s", "reached"), [(2.5e-5, 2048), (1e-3, 256)])
def test_a_gpus_steps_grow_to_what_the_budget_buys(token_s: float, reached: int) -> None:
    blocks = BlockManager(8192, BLOCK, lambda: 0.0)
    scheduler = PrefillScheduler(PrefillSchedulerSettings(), blocks, 8192 * BLOCK, "cuda")
    prompt = Sequence("a", 1, list(range(100_000)), 100_000, SamplingParams(max_tokens=8), 0.0)
    prompt.chain = HashChain(b"model", BLOCK)
    scheduler.add(prompt)
    sizes: list[int] = []
    for _ in range(12):
        rows = scheduler.schedule(0.0).rows
        sizes.append(rows[0].num_tokens)
        scheduler.observe(rows, 0.003 + token_s * sizes[-1])
        scheduler.postprocess(rows, [RowResult()])
    assert sizes[:3] == [512] * 3
    assert max(sizes) <= 2048
    assert sizes[-1] == pytest.approx(reached, rel=0.1)
    # No step took much longer than a quarter of the budget, unless its cost was not known yet.
    assert all(0.003 + token_s * size <= 0.3 for size in sizes[3:])


def test_steps_of_short_prompts_do_not_buy_a_step_of_thousands() -> None:
    """On a GPU small steps cost the same whatever their size, so tokens seem to cost nothing. Steps stay at 512 tokens."""
    blocks = BlockManager(1024, BLOCK, lambda: 0.0)
    scheduler = PrefillScheduler(PrefillSchedulerSettings(), blocks, 1024 * BLOCK, "cuda")
    prompt = Sequence("a", 1, list(range(10_000)), 10_000, SamplingParams(max_tokens=8), 0.0)
    for num_tokens in (8, 64, 12, 100):
        scheduler.observe([StepRow(prompt, num_tokens)], 0.02 + 1e-6 * num_tokens)
    prompt.chain = HashChain(b"model", BLOCK)
    scheduler.add(prompt)
    assert scheduler.schedule(0.0).rows[0].num_tokens == 512


def line(*lengths: int, started: int = 1, arrival_s: float = 0.0) -> list[Prompt]:
    return [Prompt(length, arrival_s, index < started) for index, length in enumerate(lengths)]


def order(prompts: list[Prompt], *, now_s: float = 0.0, budget_s: float = 1.0, num_tokens: int = 512) -> list[Turn]:
    """The turns of these prompts; checks that each prompt has exactly one."""
    found = turns(prompts, num_tokens, now_s, budget_s, COST, BLOCK)
    assert sorted(turn.index for turn in found) == list(range(len(prompts)))
    return found


def test_the_late_behind_a_long_prompt_share_half_of_its_step_the_shortest_first() -> None:
    assert order(line(32_000, 8000, 100, 50)) == [Turn(3, 50), Turn(2, 100), Turn(1, 96), Turn(0)]
    assert order(line(32_000, 8000)) == [Turn(1, 256), Turn(0)]
    assert order(line(200, 32_000, 50, started=2)) == [Turn(0), Turn(2, 50), Turn(1)]


@pytest.mark.parametrize(
    ("prompts", "now_s", "budget_s"),
    [
        (line(600, 600, 600, 600, 600), 0.0, 1.0),  # equal lengths
        (line(1000, 501), 0.0, 0.1),
        (line(2000, 100), 0.0, 1.0),  # the short prompt is in time without overtaking
        (line(100, 50, 300), 0.0, 0.001),  # all fit in this step
        (line(32_000, 100, started=0), 0.0, 1.0),  # the first prompt has no blocks yet, and needs them first
        (line(32_000, 100), 0.0, 0.0),  # no budget
        (line(512, 32_000, 100, started=2), 0.0, 1.0),  # the first prompt fills the step
    ],
)
def test_nobody_overtakes(prompts: list[Prompt], now_s: float, budget_s: float) -> None:
    expected = [Turn(index) for index in range(len(prompts))]
    assert order(prompts, now_s=now_s, budget_s=budget_s) == expected


def test_who_waits_becomes_late() -> None:
    prompts = line(2000, 100)
    assert order(prompts, now_s=0.2) == [Turn(0), Turn(1)]
    assert order(prompts, now_s=0.5) == [Turn(1, 100), Turn(0)]


@dataclass(slots=True)
class Served:
    """The times to first token of a load, and the worker's busy time."""

    ttft_s: dict[str, float] = field(default_factory=dict)
    busy_s: float = 0.0

    def of(self, kind: str) -> list[float]:
        return sorted(time_s for name, time_s in self.ttft_s.items() if name.startswith(kind))

    def percentile(self, kind: str, share: float) -> float:
        return self.of(kind)[int(share * len(self.of(kind)))]

    def mean(self, kind: str) -> float:
        return sum(self.of(kind)) / len(self.of(kind))


@dataclass(frozen=True, slots=True)
class Arrival:
    name: str
    at_s: float
    length: int


def serve(
    arrivals: list[Arrival], ttft_budget_ms: float, *, num_blocks: int = 8192, handoff_s: float = 0.1, seed: int = 0
) -> Served:
    """Run a worker's scheduler over ``arrivals`` in virtual time. Blocks are released ``handoff_s`` after the first token."""
    chance = random.Random(seed)
    blocks = BlockManager(num_blocks, BLOCK, lambda: 0.0)
    settings = PrefillSchedulerSettings(max_num_seqs=32, ttft_budget_ms=ttft_budget_ms)
    scheduler = PrefillScheduler(settings, blocks, num_blocks * BLOCK, "cpu")
    served, now_s, coming = Served(), 0.0, sorted(arrivals, key=lambda arrival: arrival.at_s)
    held: list[tuple[float, Sequence]] = []
    for number in itertools.count():
        assert number < 1_000_000, "a prompt is never served"
        while coming and coming[0].at_s <= now_s:
            arrival = coming.pop(0)
            tokens = [len(coming), *range(1, arrival.length)]  # a different first token: no prefix is cached
            params = SamplingParams(max_tokens=8, temperature=0.0)
            made = Sequence(arrival.name, 1, tokens, arrival.length, params, arrival.at_s)
            made.chain = HashChain(b"model", BLOCK)
            scheduler.add(made)
        for release_s, sequence in [one for one in held if one[0] <= now_s]:
            blocks.release(sequence_owner(sequence.key))
            held.remove((release_s, sequence))
        rows = scheduler.schedule(now_s).rows
        if not rows:
            later = [arrival.at_s for arrival in coming[:1]] + [release_s for release_s, _ in held]
            if not later:
                assert not scheduler.waiting
                assert not scheduler.running
                return served
            now_s = min(later)
            continue
        num_tokens = sum(row.num_tokens for row in rows)
        assert 0 < num_tokens <= 512
        assert len({row.sequence.key for row in rows}) == len(rows)
        step_s = COST.fixed_s + COST.token_s * num_tokens
        if ttft_budget_ms > 0:  # noise in the observed times, as from other programs; virtual time has none
            scheduler.observe(rows, step_s * (5 if chance.random() < 0.05 else chance.uniform(0.95, 1.05)))
        now_s += step_s
        served.busy_s += step_s
        results = [RowResult((SampledToken(7),) if row.samples else ()) for row in rows]
        for row, item in zip(rows, scheduler.postprocess(rows, results), strict=True):
            assert item.token is not None or row.sequence.num_computed_tokens == item.num_ready_blocks * BLOCK > 0
            if item.token is not None:
                served.ttft_s[row.sequence.request_id] = now_s - row.sequence.arrival_s
                held.append((now_s + handoff_s, row.sequence))
        if number % 16 == 0:
            scheduler.check_integrity()
    raise AssertionError


def random_load(seed: int, span_s: float = 90.0) -> list[Arrival]:
    """A load of two thirds of what a worker can compute: few long prompts and many short ones."""
    chance = random.Random(seed)
    arrivals: list[Arrival] = []
    for kind, mean_gap_s, lengths in (("long", 12.0, (8000, 20_000)), ("short", 0.4, (50, 400))):
        at_s = chance.expovariate(1 / mean_gap_s)
        while at_s < span_s:
            arrivals.append(Arrival(f"{kind}{len(arrivals)}", at_s, chance.randint(*lengths)))
            at_s += chance.expovariate(1 / mean_gap_s)
    arrivals.append(Arrival("long-first", 0.0, 32_000))
    return arrivals


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_blocks", [8192, 2600])  # with 2,600 two long prompts do not fit at a time
def test_short_prompts_do_not_wait_for_long_ones_and_long_ones_lose_little(seed: int, num_blocks: int) -> None:
    arrivals = random_load(seed)
    before = serve(arrivals, 0.0, num_blocks=num_blocks, seed=seed)
    after = serve(arrivals, 1000.0, num_blocks=num_blocks, seed=seed)
    assert before.ttft_s.keys() == after.ttft_s.keys() == {arrival.name for arrival in arrivals}
    assert after.busy_s <= 1.1 * before.busy_s
    assert after.percentile("short", 0.99) <= min(1.5, before.percentile("short", 0.99) / 5)
    assert after.mean("long") <= 1.3 * before.mean("long")
    for name, ttft_s in after.ttft_s.items():
        assert ttft_s <= 2 * before.ttft_s[name] + 1.0, name


def test_a_budget_that_nothing_could_keep_costs_less_than_a_tenth_of_the_throughput() -> None:
    arrivals = random_load(0, span_s=40.0)
    busy_s = serve(arrivals, 20.0).busy_s / serve(arrivals, 0.0).busy_s
    assert 1.01 < busy_s < 1.1  # steps have the smallest allowed size


def test_a_long_prompt_keeps_half_of_every_step_whoever_comes() -> None:
    """Short prompts flood the worker. The long prompt ends after about twice the time that it takes alone."""
    flood = [Arrival(f"short{index}", 0.5 + 0.03 * index, 200) for index in range(1000)]
    alone = serve([Arrival("long", 0.0, 16_000)], 1000.0).ttft_s["long"]
    flooded = serve([Arrival("long", 0.0, 16_000), *flood], 1000.0)
    assert 1.5 * alone < flooded.ttft_s["long"] <= 2.2 * alone


def test_equal_prompts_are_served_as_without_a_budget() -> None:
    arrivals = [Arrival(f"same{index}", 0.01 * index, 600) for index in range(20)]
    assert serve(arrivals, 10_000.0).ttft_s == pytest.approx(serve(arrivals, 0.0).ttft_s)
    mean = sum(serve(arrivals, 500.0).ttft_s.values()) / sum(serve(arrivals, 0.0).ttft_s.values())
    assert mean <= 1.05


def test_nobody_overtakes_a_prompt_whose_image_would_find_no_room_then() -> None:
    line = [Prompt(1000, 0.0, is_started=True, num_together=300), Prompt(20, 0.0, is_started=False)]
    assert turns(line, 512, 9.0, 1.0, COST, BLOCK) == [Turn(0), Turn(1)]
    line[0] = replace(line[0], num_together=256)
    assert turns(line, 512, 9.0, 1.0, COST, BLOCK) == [Turn(1, 20), Turn(0)]
