"""Several ranks: what they compute, and how their engine ends when one of them does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import transformers

from kvrelay.common.errors import ModelError
from kvrelay.engine.backends.cpu.linear import has_packed_linear
from kvrelay.engine.ranks.engine import RankedEngine, Ranks
from kvrelay.engine.ranks.group import Meeting, RankGroup
from kvrelay.engine.ranks.messages import LoadSettings
from kvrelay.engine.settings import KvSettings, ModelSettings
from kvrelay.engine.step.interface import DeviceFailedError, Engine, StepRow
from tests.engine.conftest import SIZES, VOCAB, assert_same_tokens, load, save_model, sequence, tokens
from tests.engine.led import step
from tests.engine.weights.stored_models import save_gpt_oss, save_in_format, save_llama

from .conftest import load_ranks

# Ranks add the parts of a sum in another order than one product does: 1.001e-5 in gpt_oss, of log probabilities down to -13.
ROUNDING = 2e-5
SOON_S = 10.0  # on a machine with other things to do


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("llama")
    save_model(directory, transformers.LlamaConfig(**SIZES))
    return directory


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for three ranks."""
    directory: Path = tmp_path_factory.mktemp("three")
    save_model(directory, transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": SIZES["num_attention_heads"]}))
    return directory


@pytest.fixture
def engine(model: Path) -> Iterator[Any]:
    """Of two ranks, which may die."""
    loaded = load_ranks(model, 2)
    started = pids()
    assert len(started) == 1
    yield loaded
    loaded.close()
    assert not any(map(is_alive, started)), "a rank outlives its engine"


def pids(leader: int | None = None) -> list[int]:
    """The ranks that a process, this one by default, has started: the first one first."""
    children = psutil.Process(leader).children()
    ranks = [child for child in children if "kvrelay.engine.rank_main" in child.cmdline()]
    return [rank.pid for rank in sorted(ranks, key=psutil.Process.create_time)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Any, what: str) -> None:
    end_s = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end_s, f"{what}, after {SOON_S:g} s"
        time.sleep(0.02)


def run(engine: Engine, **sampling: Any) -> Any:
    """A prompt in two chunks, and a token."""
    row = sequence(tokens(1, 45), [5, 9, 2, 30], num_groups=len(engine.card.layout.geometry.groups), **sampling)
    step(engine, [StepRow(row, 20)])
    row.num_computed_tokens = 20
    (result,) = step(engine, [StepRow(row, 25)])
    row.num_computed_tokens = 45
    assert result is not None
    return row, result


def test_log_probabilities_and_blocks_are_those_of_one_rank(engine: Any, model: Path) -> None:
    alone = load(model, model_id=model.name)
    asking = {"num_logprobs": VOCAB, "num_prompt_logprobs": 3}
    (ours, result), (theirs, expected) = run(engine, **asking), run(alone, **asking)
    assert_same_tokens([result], [expected])
    assert_same_tokens(ours.prompt_logprobs, theirs.prompt_logprobs)
    assert len(ours.prompt_logprobs) == 44
    assert engine.card == alone.card, "two workers with unequal ranks are not each other's peers"
    for block_id in (5, 9):
        whole = np.frombuffer(engine.store.open_read(block_id, 0).wait(None, 1), dtype=np.float32)
        np.testing.assert_allclose(
            whole, np.frombuffer(alone.store.open_read(block_id, 0), dtype=np.float32), atol=1e-4
        )


def test_experts_and_sinks_are_cut_as_they_are_one_model(tmp_path: Path) -> None:
    given = {"num_experts_per_tok": 2, "num_local_experts": 5, "attention_bias": True, "sliding_window": 9}
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    save_model(tmp_path, transformers.GptOssConfig(**SIZES, **given, layer_types=layer_types))
    engine: Any = load_ranks(tmp_path, 2)
    try:
        (_, result), (_, expected) = (run(one, num_logprobs=VOCAB) for one in (engine, load(tmp_path)))
        assert_same_tokens([result], [expected])
    finally:
        engine.close()


SPARSE: dict[str, tuple[Any, int]] = {  # and how many ranks
    "gpt_oss-2": (
        transformers.GptOssConfig(
            **SIZES, num_experts_per_tok=2, num_local_experts=5, attention_bias=True, sliding_window=None
        ),
        2,
    ),
    "mixtral-2": (
        transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None), 2
    ),
    "qwen3_moe-3": (
        transformers.Qwen3MoeConfig(
            **{**SIZES, "num_key_value_heads": 3}, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=32,
            mlp_only_layers=[1], norm_topk_prob=True,
        ), 3
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", SPARSE)
def test_ranks_with_whole_experts_compute_what_one_rank_does(tmp_path: Path, family: str) -> None:
    config, num_ranks = SPARSE[family]
    save_model(tmp_path, config)
    engine: Any = load_ranks(tmp_path, num_ranks, expert_parallel=True)
    try:
        (_, result), (_, expected) = (run(one, num_logprobs=VOCAB) for one in (engine, load(tmp_path)))
        assert_same_tokens([result], [expected], ROUNDING)
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["awq by 96", "gptq-act-order", "mxfp4"])
def test_ranks_of_a_quantised_checkpoint_compute_what_one_rank_does(name: str, tmp_path: Path) -> None:
    """On CPUs each makes full weights of its part."""
    directory = tmp_path / "stored"
    if name == "mxfp4":
        directory.mkdir()
        save_gpt_oss(directory)
    else:
        (tmp_path / "full").mkdir()
        save_llama(tmp_path / "full")
        save_in_format(tmp_path / "full", directory, name)
    engine: Any = load_ranks(directory, 2, dtype="float32")
    try:
        (_, result), (_, expected) = (
            run(one, num_logprobs=VOCAB) for one in (engine, load(directory, dtype="float32"))
        )
        assert_same_tokens([result], [expected], ROUNDING)
    finally:
        engine.close()


def test_ranks_with_rounded_weights_compute_what_one_rank_does(tmp_path: Path) -> None:
    """The same 8 bits, in sums of another order: bf16 rounds each of two parts. What 8 bits change is more."""
    if not has_packed_linear(torch.bfloat16):
        pytest.skip("this CPU has no bf16 kernels")
    save_model(tmp_path, transformers.LlamaConfig(**{**SIZES, "initializer_range": 0.05}))
    chosen: dict[str, Any] = {"weight_format": "int8", "dtype": "bfloat16"}
    engine: Any = load_ranks(tmp_path, 2, **chosen)
    try:
        two, one, full = (
            dict(run(which, num_logprobs=VOCAB)[1].top_logprobs)
            for which in (engine, load(tmp_path, **chosen), load(tmp_path, dtype="bfloat16"))
        )
    finally:
        engine.close()
    distances = [np.std([which[token_id] - one[token_id] for token_id in one]) for which in (two, full)]
    assert distances[0] < 0.5 * distances[1], distances


def test_blocks_of_one_rank_continue_on_two_and_back(engine: Any, model: Path) -> None:
    """A hand-off without a network, both ways."""
    alone = load(model, model_id=model.name)
    for source, target in ((alone, engine), (engine, alone)):
        row, result = run(source, num_logprobs=5)
        row.token_ids.append(result.token_id)
        moved = sequence(row.token_ids, [60, 61, 62], num_logprobs=5)
        for ours, theirs in zip(row.block_tables[0][:3], moved.block_tables[0], strict=True):
            given = source.store.open_read(ours, 0)
            target.store.open_write(theirs, 0)[:] = given if isinstance(given, memoryview) else given.wait(None, 1)
            target.store.close_write(theirs)
        moved.num_computed_tokens = 45
        (next_token,) = step(target, [StepRow(moved, 1)])
        (expected,) = step(source, [StepRow(row, 1)])
        assert next_token is not None
        assert expected is not None
        assert_same_tokens([next_token], [expected])


def test_each_rank_writes_a_trace_of_the_same_steps(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    engine: Any = load_ranks(model, 2)
    try:
        pattern = engine.profiler.ask(2)
        assert pattern is not None
        assert engine.profiler.ask(1) is None
        run(engine)
        wait_until(lambda: len(list(tmp_path.glob("kvrelay-profile-*/rank-1.json"))) == 1, "no trace of rank 1")
        run(engine)  # behind the writing of the first rank
        traces = sorted(tmp_path.glob("kvrelay-profile-*/rank-*.json"), key=lambda path: path.name)
        assert [path.name for path in traces] == ["rank-0.json", "rank-1.json"]
        for path in traces:
            names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
            assert names.count("step") == 2, path
        assert engine.profiler.ask(1) is not None
    finally:
        engine.close()


def test_a_step_that_no_rank_can_compute_ends_nothing(engine: Any, model: Path) -> None:
    with pytest.raises(ValueError, match="33 tokens behind 0 do not fit 2 blocks of 16"):
        step(engine, [StepRow(sequence(tokens(0, 33), [1, 2]), 33)])
    engine.check_device()
    assert_same_tokens([run(engine)[1]], [run(load(model))[1]])


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
    """It is alive, and never comes to the step's first collective."""
    engine: Any = load_ranks(three, 3)
    try:
        waits, hangs = engine._ranks.others
        monkeypatch.setattr(hangs, "send", lambda message: None)

        def times_out(plan: Any) -> Any:
            wait_until(lambda: waits.num_meetings > hangs.num_meetings, "rank 1 has not entered a collective")
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
    """For collectives have half a minute."""
    groups: list[RankGroup] = []
    joins, meets = Ranks.join, Ranks.meet

    def join(ranks: Ranks, settings: Any) -> RankGroup:
        groups.append(joins(ranks, settings))
        os.kill(ranks.others[0].pid, signal.SIGSTOP)
        return groups[0]

    def meet(ranks: Ranks) -> None:
        if groups:
            assert not groups[0].num_meetings
            os.kill(ranks.others[0].pid, signal.SIGCONT)
        meets(ranks)

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
    os.mkfifo(tmp_path / "config.json")  # whoever opens it waits for a writer

    def is_loaded(part: Any) -> Any:
        monkeypatch.setattr("kvrelay.engine.ranks.engine.LOAD_S", 0.5)
        part.meet()

    settings = ModelSettings(model=str(tmp_path), device="cpu", tensor_parallel=2, threads=2)
    with pytest.raises(ModelError, match=r"^rank 1 \(process \d+\) has not loaded 0.5 s after its leader: it hangs$"):
        RankedEngine.load(LoadSettings(settings, KvSettings(num_blocks=8), 4, None, decodes=True), is_loaded)
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
    monkeypatch.setattr("kvrelay.engine.ranks.rank.SILENT_S", 3.0)
    engine: Any = load_ranks(model, 2)
    (pid,) = pids()
    try:
        os.kill(pid, signal.SIGSTOP)
        began_s = time.monotonic()
        with pytest.raises(DeviceFailedError, match="has been silent for 3 s: it hangs"):
            run(engine)
        assert time.monotonic() - began_s < SOON_S
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
    with pytest.raises(ModelError, match="rank 1: 'WORLD_SIZE'"):
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
        (2, {"backend": "transformers"}, "models that run through transformers have ranks on CPUs only"),
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
