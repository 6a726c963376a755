"""The end of an engine of several ranks when one rank dies, hangs, or cannot join."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import transformers

from kvrelay.common.errors import ModelError
from kvrelay.engine.ranks.engine import RankedEngine, Ranks
from kvrelay.engine.ranks.group import Meeting, RankGroup
from kvrelay.engine.ranks.messages import TOGETHER_S, LoadSettings
from kvrelay.engine.settings import KvSettings, ModelSettings
from kvrelay.engine.step.interface import DeviceFailedError, StepRow
from tests.engine.conftest import SIZES, assert_same_tokens, load, save_model, sequence, tokens
from tests.engine.led import step
from tests.processes import is_alive

from .conftest import load_ranks
from .rig import ROUNDING, expect_signs_within, pids, run, wait_until


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that three ranks can share."""
    directory: Path = tmp_path_factory.mktemp("three")
    save_model(directory, transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": SIZES["num_attention_heads"]}))
    return directory


def test_a_step_that_no_rank_can_compute_ends_nothing(engine: Any, model: Path) -> None:
    with pytest.raises(ValueError, match="33 tokens behind 0 do not fit 2 blocks of 16"):
        step(engine, [StepRow(sequence(tokens(0, 33), [1, 2]), 33)])
    engine.check_device()
    assert_same_tokens([run(engine)[1]], [run(load(model))[1]], ROUNDING)


def test_a_rank_that_is_not_where_its_leader_is_ends_the_engine(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(plan: Any) -> Any:
        raise MemoryError("only here")

    monkeypatch.setattr(engine._own, "launch", fails)
    monkeypatch.setattr("kvrelay.engine.ranks.engine.AGREE_S", 1.0)
    reason = r"rank 1 \(process \d+\) is not where its leader is, which failed: only here"
    with pytest.raises(DeviceFailedError, match=reason):
        run(engine)
    with pytest.raises(DeviceFailedError, match=reason):
        engine.check_device()


def test_a_rank_that_dies_ends_the_engine_with_a_reason(engine: Any) -> None:
    run(engine)
    assert not engine.not_live()
    (pid,) = pids()
    os.kill(pid, signal.SIGKILL)
    wait_until(engine.not_live, "nobody has noticed that a rank is dead")
    assert engine.not_live() == [f"rank 1 (process {pid}) was ended by SIGKILL"]
    with pytest.raises(DeviceFailedError, match="SIGKILL"):
        run(engine)


def test_the_rank_that_died_is_named_and_not_one_that_was_killed_for_it(three: Path) -> None:
    engine: Any = load_ranks(three, 3)
    try:
        first, second = pids()
        os.kill(second, signal.SIGKILL)
        wait_until(lambda: not is_alive(first), "the other rank has not ended")
        assert engine.not_live() == [f"rank 2 (process {second}) was ended by SIGKILL"]
    finally:
        engine.close()


def test_the_rank_that_others_wait_for_is_named_and_not_one_that_waits(
    three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank is alive, but never enters the step's first collective."""
    engine: Any = load_ranks(three, 3)
    try:
        waits, hangs = engine._ranks.others
        monkeypatch.setattr(hangs, "send", lambda message: None)

        def times_out(plan: Any) -> Any:
            # Their leader has not entered this collective, and what it hears of the other rank may be old.
            wait_until(lambda: waits.num_meetings > engine._group.num_meetings, "rank 1 has not entered a collective")
            raise TimeoutError("nobody came")

        monkeypatch.setattr(engine._own, "launch", times_out)
        monkeypatch.setattr("kvrelay.engine.ranks.engine.AGREE_S", 0.5)
        with pytest.raises(DeviceFailedError, match=r"^rank 2 .* is not where its leader is, .*: nobody came$"):
            run(engine)
    finally:
        engine.close()


def test_a_rank_that_loads_later_than_its_leader_is_waited_for_outside_of_collectives(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective waits for half a minute at most, which loading may exceed."""
    groups: list[RankGroup] = []
    joins, meets = Ranks.join, Ranks.meet

    def join(ranks: Ranks, settings: Any) -> RankGroup:
        groups.append(joins(ranks, settings))
        os.kill(ranks.others[0].pid, signal.SIGSTOP)
        return groups[0]

    def meet(ranks: Ranks, told: bytes = b"") -> bytes:
        if groups:
            assert not groups[0].num_meetings
            os.kill(ranks.others[0].pid, signal.SIGCONT)
        return meets(ranks, told)

    monkeypatch.setattr(Ranks, "join", join)
    monkeypatch.setattr(Ranks, "meet", meet)
    engine: Any = load_ranks(model, 2, backend="transformers", dtype="float32")
    try:
        assert groups[0].num_meetings, "the check of a model compares what all ranks compute"
    finally:
        engine.close()


def test_a_rank_that_does_not_come_to_an_end_of_loading_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "config.json")  # opening it waits for a writer

    def is_loaded(part: Any, _progress: Any) -> Any:
        monkeypatch.setattr("kvrelay.engine.ranks.engine.LOAD_S", 0.5)
        part.meet()

    settings = ModelSettings(model=str(tmp_path), device="cpu", tensor_parallel=2, threads=2)
    with pytest.raises(ModelError, match=r"^rank 1 \(process \d+\) has not loaded 0.5 s after its leader: it hangs$"):
        RankedEngine.load(
            LoadSettings(settings, KvSettings(num_blocks=8), 4, None, decodes=True), is_loaded, lambda *_: None
        )
    assert not pids()


def test_a_rank_that_dies_in_the_check_of_a_model_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Ranks] = []
    joins, adds_up = Ranks.join, RankGroup.sum

    def join(ranks: Ranks, settings: Any) -> RankGroup:
        started.append(ranks)
        return joins(ranks, settings)

    def add_up(group: RankGroup, partial: Any) -> Any:
        os.kill(started[0].others[0].pid, signal.SIGKILL)
        return adds_up(group, partial)

    monkeypatch.setattr(Ranks, "join", join)
    monkeypatch.setattr(RankGroup, "sum", add_up)
    with pytest.raises(ModelError, match=r"^rank 1 \(process \d+\) was ended by SIGKILL$"):
        load_ranks(model, 2, backend="transformers", dtype="float32")


def test_a_rank_that_hangs_in_the_middle_of_a_step_ends_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = load_ranks(model, 2)
    (pid,) = pids()
    try:
        expect_signs_within(engine, 3.0, monkeypatch)
        os.kill(pid, signal.SIGSTOP)
        began_s = time.monotonic()
        with pytest.raises(DeviceFailedError, match="has been silent for 3 s: it hangs"):
            run(engine)
        assert time.monotonic() - began_s < TOGETHER_S, "it was the collective that gave up"
    finally:
        engine.close()
    assert not is_alive(pid)


def test_a_rank_that_cannot_load_or_join_is_named(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, transformers.LlamaConfig(**SIZES))
    loads = RankedEngine.load

    def without_weights(*arguments: Any) -> Any:
        (tmp_path / "model.safetensors").unlink()
        return loads(*arguments)

    monkeypatch.setattr(RankedEngine, "load", without_weights)
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        load_ranks(tmp_path, 2)
    monkeypatch.undo()
    monkeypatch.setattr(Meeting, "environment", lambda self, rank: {"RANK": "1"})
    with pytest.raises(ModelError, match=r"rank 1 .* cannot load its part: KeyError: 'WORLD_SIZE'"):
        load_ranks(model, 2)


def test_what_ranks_do_not_serve_is_refused_before_any_starts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.engine.ranks.engine.Ranks", None)
    with pytest.raises(ModelError, match="6 query and 2 K/V heads, which fit 1, 2, 6 ranks"):
        load_ranks(model, 3)
    with pytest.raises(ModelError, match="--weight-format is int8, which needs a model with a path of its own"):
        load_ranks(model, 2, weight_format="int8", backend="transformers")
    with pytest.raises(ModelError, match="LlamaForCausalLM has no experts"):
        load_ranks(model, 2, expert_parallel=True)
    with pytest.raises(ModelError, match="--tensor-parallel is 2 and --fp8-activations is on; a row's scale is of all"):
        load_ranks(model, 2, fp8_activations=True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for num_ranks, settings, reason in (
        (3, {}, "this worker sees 2 GPUs, one for each rank"),
        (2, {"kv_dtype": "fp8"}, "--kv-dtype fp8, whose scales are not cut among ranks"),
    ):
        with pytest.raises(ModelError, match=reason):
            load_ranks(model, num_ranks, device="cuda", **settings)


LEADER = """
import sys, time
sys.path.append(sys.argv[2])
from tests.engine.ranks.conftest import load_ranks
from pathlib import Path
engine = load_ranks(Path(sys.argv[1]), 2)
print("up", flush=True)
time.sleep(60)
"""


def test_a_leader_that_is_killed_leaves_no_rank(model: Path) -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", LEADER, str(model), str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        assert leader.stdout.readline() == "up\n"
        (pid,) = pids(leader.pid)
        leader.kill()
    wait_until(lambda: not is_alive(pid), "the rank has not ended")


def test_ranks_load_again_where_groups_of_stages_could_not_be_opened(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(_group: RankGroup) -> None:
        raise ValueError("no group")

    with monkeypatch.context() as patched:
        patched.setattr(RankGroup, "_open_stages", refuses)
        with pytest.raises(ValueError, match="no group"):
            load_ranks(model, 1, num_stages=2)
    engine: Any = load_ranks(model, 1, num_stages=2)
    engine.close()
