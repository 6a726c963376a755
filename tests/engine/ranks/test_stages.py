"""Several stages: their results, their blocks, and the end of the engine when one stage fails."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from kvrelay.common.errors import ModelError
from kvrelay.engine.kv.geometry import geometry_of
from kvrelay.engine.ranks.messages import TOGETHER_S
from kvrelay.engine.step.interface import DeviceFailedError, StepRow
from kvrelay.engine.step.leader import Leader
from kvrelay.engine.step.plan import StepPlan
from tests.engine.conftest import SIZES, assert_same_tokens, load, save_model, sequence, tokens
from tests.engine.led import step
from tests.processes import is_alive

from .conftest import load_ranks
from .rig import ROUNDING, expect_signs_within, expect_what_one_rank_gives, pids, run, wait_until


@pytest.fixture
def engine(model: Path) -> Iterator[Any]:
    """An engine of three stages, which a test may kill."""
    loaded = load_ranks(model, 1, num_stages=3)
    started = pids()
    assert len(started) == 2
    yield loaded
    loaded.close()
    assert not any(map(is_alive, started)), "a rank outlives its engine"


def test_log_probabilities_and_blocks_are_those_of_one_rank(engine: Any, model: Path) -> None:
    expect_what_one_rank_gives(engine, load(model, model_id=model.name), bound=1e-5)
    assert engine.num_stages == 3


def test_a_stage_keeps_the_blocks_of_its_layers_only(engine: Any, model: Path) -> None:
    whole = load(model, model_id=model.name)
    assert engine._own.blocks.nbytes * 3 == whole.blocks.nbytes
    assert geometry_of(engine._own._model._config, 16, engine._own._pool.tensor.dtype).block_nbytes * 3 == (
        engine.card.layout.geometry.block_nbytes
    )


WINDOWS = transformers.GptOssConfig(
    **{**SIZES, "num_hidden_layers": 4}, num_experts_per_tok=2, num_local_experts=5, attention_bias=True, sliding_window=9,
    layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
)  # fmt: skip
HAND_OVERS = [((1, 2), (1, 1)), ((1, 1), (1, 3)), ((2, 2), (1, 1)), ((1, 1), (2, 2))]  # ranks of a stage, and stages


@pytest.mark.parametrize(("prefill", "decode"), HAND_OVERS, ids=str)
@pytest.mark.parametrize("config", [transformers.LlamaConfig(**SIZES), WINDOWS], ids=["one group", "windows"])
def test_blocks_go_on_in_other_stages(
    config: Any, prefill: tuple[int, int], decode: tuple[int, int], tmp_path: Path
) -> None:
    """Blocks are copied to an engine with other stages, and the next token is the same."""
    save_model(tmp_path, config)
    source, target = (
        load_ranks(tmp_path, ranks, num_stages=stages, dtype="float32") for ranks, stages in (prefill, decode)
    )
    try:
        assert source.card == target.card
        groups = range(len(source.card.layout.geometry.groups))
        row, result = run(source, num_logprobs=5)
        row.token_ids.append(result.token_id)
        moved = sequence(row.token_ids, [60, 61, 62, 63], num_groups=len(groups), num_logprobs=5)
        for group in groups:
            for ours, theirs in zip(row.block_tables[group][:3], moved.block_tables[group], strict=False):
                given: Any = source.store.open_read(ours, group)
                target.store.open_write(theirs, group)[:] = (
                    given if isinstance(given, memoryview) else given.wait(None, 1)
                )
                target.store.close_write(theirs)
        moved.num_computed_tokens = 45
        assert_same_tokens(step(target, [StepRow(moved, 1)]), step(source, [StepRow(row, 1)]), ROUNDING)
    finally:
        source.close()
        target.close()


def test_steps_of_other_sequences_are_under_way_beside_each_other(engine: Any, model: Path) -> None:
    """Three steps are launched before the first result is read. Results come in the order of the launches."""
    alone = Leader(load(model))
    sequences = [sequence(tokens(seed, 30), [3 * seed, 3 * seed + 1], num_logprobs=5) for seed in range(1, 4)]
    expected = [alone.step([StepRow(one, 30)])[0].tokens[0] for one in sequences]
    leader = Leader(engine)
    launched = [leader.launch([StepRow(one, 30)]) for one in sequences]
    found = [step.wait()[0].tokens[0] for step in launched]
    assert_same_tokens(found, expected)


def test_chunks_of_one_prompt_are_under_way_behind_each_other(engine: Any, model: Path) -> None:
    prompt = sequence(tokens(1, 45), [5, 9, 2], num_logprobs=5)
    leader = Leader(engine)
    chunks = [StepRow(prompt, 20), StepRow(prompt, 20, 20), StepRow(prompt, 5, 40)]
    launched = [leader.launch([row]) for row in chunks]
    results = [step.wait()[0].tokens for step in launched]
    assert results[:2] == [(), ()]
    assert_same_tokens(list(results[2]), [run(load(model), num_logprobs=5)[1]])


def test_a_step_that_no_stage_can_compute_ends_nothing_also_with_steps_under_way(engine: Any, model: Path) -> None:
    leader = Leader(engine)
    one = sequence(tokens(1, 45), [5, 9, 2, 30])
    flying = leader.launch([StepRow(one, 20)])
    with pytest.raises(ValueError, match="33 tokens behind 0 do not fit 2 blocks of 16"):
        leader.launch([StepRow(sequence(tokens(0, 33), [1, 2]), 33)])
    flying.wait()
    engine.check_device()
    assert_same_tokens([run(engine)[1]], [run(load(model))[1]])


def test_a_step_that_cannot_be_sampled_ends_alone(engine: Any, model: Path) -> None:
    """Only the last stage has logits, so only it fails, as with a logits processor that raises."""
    leader = Leader(engine)
    good, bad = sequence(tokens(1, 20), [5, 9]), sequence(tokens(2, 20), [6, 7])
    launch = engine.launch

    def without_rules(plan: StepPlan) -> Any:
        bias = plan.sampling.rules if plan.sampling else None
        if bias is None or not bias.bias_rows:
            return launch(plan)
        bias.bias_rows[:] = [10**6]  # no such row
        return launch(plan)

    engine.launch = without_rules
    bad.sampling = sequence([1], [1], logit_bias=((3, 1.0),)).sampling
    steps = [leader.launch([StepRow(one, 20)]) for one in (good, bad, good)]
    expected = run_alone(model, good)
    assert_same_tokens([steps[0].wait()[0].tokens[0]], [expected])
    for _ in range(2):  # the error is raised at every wait
        with pytest.raises(RuntimeError, match="the last stage cannot sample: "):
            steps[1].wait()
    assert_same_tokens([steps[2].wait()[0].tokens[0]], [expected])
    engine.check_device()


def run_alone(model: Path, row: Any) -> Any:
    (result,) = Leader(load(model)).step([StepRow(row, 20)])
    return result.tokens[0]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_stage_that_dies_ends_the_engine_with_a_reason(engine: Any, stage: int) -> None:
    run(engine)
    assert not engine.not_live()
    pid = pids()[stage - 1]
    began_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(DeviceFailedError, match=rf"rank {stage} \(process {pid}\) was ended by SIGKILL"):
        run(engine)
    assert time.monotonic() - began_s < TOGETHER_S, "it was the collective that gave up"
    wait_until(engine.not_live, "nobody has noticed that a stage is dead")
    assert engine.not_live() == [f"rank {stage} (process {pid}) was ended by SIGKILL"]


def test_a_stage_that_hangs_with_steps_under_way_ends_them(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = load_ranks(model, 1, num_stages=3)
    middle, _ = pids()
    try:
        expect_signs_within(engine, 3.0, monkeypatch)
        os.kill(middle, signal.SIGSTOP)
        began_s = time.monotonic()
        with pytest.raises(DeviceFailedError, match=r"rank 1 .* has been silent for 3 s: it hangs"):
            run(engine)
        assert time.monotonic() - began_s < TOGETHER_S, "it was the collective that gave up"
    finally:
        engine.close()
    assert not is_alive(middle)


def test_a_stage_that_tells_no_tokens_is_named(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage is alive, but never gets the plan."""
    monkeypatch.setattr("kvrelay.engine.ranks.engine.TOGETHER_S", 0.1)
    monkeypatch.setattr(engine._ranks.others[1], "send", lambda message: None)
    with pytest.raises(
        DeviceFailedError, match=r"rank 2 .* has told no tokens of a step for 0\.4 s: it hangs, or waits"
    ):
        run(engine)


def test_what_stages_do_not_serve_is_refused_before_any_starts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.engine.ranks.engine.Ranks", None)
    with pytest.raises(ModelError, match=r"--pipeline-parallel is 4; .* has 3 layers"):
        load_ranks(model, 1, num_stages=4)
    with pytest.raises(ModelError, match="models that run through transformers have no stages: take 1"):
        load_ranks(model, 1, num_stages=2, backend="transformers")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    with pytest.raises(ModelError, match="is 2 and --pipeline-parallel 2, and this worker sees 3 GPUs"):
        load_ranks(model, 2, num_stages=2, device="cuda")
