"""Recurrent layers, whose states later tokens replace: no token may be computed twice, or behind the state of others."""

from __future__ import annotations

import mmap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.qwen3_next import modeling_qwen3_next

from kvrelay.common.errors import ModelError, SettingsError
from kvrelay.common.kv_geometry import GroupKind
from kvrelay.common.sampling import BeamSearch
from kvrelay.common.sampling import SamplingParams as Sampling
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.decode_worker.worker import DecodeWorker
from kvrelay.engine.backends.cpu.ops import CpuPagedOps, CpuPagedStep
from kvrelay.engine.backends.cuda.trial import run_largest_step
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.host.tier import HostTier
from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.engine.outline import outline_model
from kvrelay.engine.step.batch import Batch
from kvrelay.engine.step.interface import LaunchedStep
from kvrelay.engine.step.plan import StepPlan
from kvrelay.engine.torch_engine import TorchEngine
from kvrelay.executor import LLM, SamplingParams
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.prefill_worker.worker import PrefillWorker
from tests.decode_worker.rig import Rig, greedy
from tests.decode_worker.test_run_ahead_torch import BrokenOnceAsked
from tests.e2e.test_model_types import save
from tests.prefill_worker.rig import ModelRig
from tests.relay.workers import ADDRESS, worker_setup

from .services import Engines
from .test_types import NUM_SCARCE_BLOCKS, assert_equal, engine_of, options_of, saved
from .tiny import generate

PROMPT = [3 + 7 * index % 190 for index in range(41)]
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A directory with a model that has recurrent layers and attention, and the model itself."""
    directory = tmp_path_factory.mktemp("hybrid")
    return directory, save("qwen3_next", directory)[0]


def llm_of(directory: Path, **options: Any) -> LLM:
    return LLM(str(directory), dtype="float32", threads=1, max_num_seqs=12, **options)


def tokens(llm: LLM, prompt: list[int], **params: Any) -> tuple[list[list[int]], int]:
    """All outputs' tokens, and the number of prompt tokens that were cached."""
    (output,) = llm.generate(prompt, SamplingParams(**{"max_tokens": 12, "temperature": 0.0} | params))
    return [one.token_ids for one in output.outputs], output.num_cached_tokens


def test_a_sequence_continues_behind_cached_blocks(hybrid: tuple[Path, PreTrainedModel]) -> None:
    directory, model = hybrid
    answer = generate(model, PROMPT, 12)[0]
    turn = [*PROMPT, *answer[:9], 5, 6, 7]  # the answer's blocks are cached, too
    with llm_of(directory, block_size=4, num_blocks=60) as llm:
        assert tokens(llm, PROMPT, ignore_eos=True) == ([answer], 0)
        assert tokens(llm, PROMPT, ignore_eos=True) == ([answer], 40)
        assert tokens(llm, turn, ignore_eos=True) == ([generate(model, turn, 12)[0]], 48)


@pytest.mark.parametrize(("block_size", "num_steps"), [(4, 4), (4, 7), (16, 14)])
def test_a_preempted_beam_search_finds_the_same_beams(
    hybrid: tuple[Path, PreTrainedModel], block_size: int, num_steps: int
) -> None:
    """The beams then share the blocks up to the end of a block only: behind it the leader's state is of other tokens."""
    params = Sampling(max_tokens=40, temperature=0.0, beam_search=BeamSearch(width=3, num_return=3))
    engine, prompt = engine_of(hybrid[0], block_size=block_size), PROMPT[:7]
    alone, rig = Rig(engine), Rig(engine)
    alone.local("a", prompt, params)
    rig.local("a", prompt, params)
    for _ in range(num_steps):
        rig.step()
    lease = Owner(OwnerKind.LEASE, "x")
    while rig.num_preemptions == 0 and rig.scheduler.running:
        rig.blocks.release(lease)
        rig.blocks.allocate(lease, rig.blocks.num_allocatable // rig.blocks.num_groups, is_whole=True)
        rig.step()
    rig.blocks.release(lease)
    assert rig.run()["a"] == alone.run()["a"]
    assert rig.num_preemptions == 1


class Failing:
    """An engine whose every third step fails after it was computed."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self.num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Compute, and fail now and then."""
        step = self._engine.launch(plan)
        self.num_steps += 1
        if self.num_steps % 3 == 0:
            raise RuntimeError("made to fail")
        return step


@pytest.mark.parametrize("model_type", ["qwen3_next", "lfm2"])
async def test_a_failed_step_is_computed_again_from_the_states_before(model_type: str, tmp_path: Path) -> None:
    model = saved(model_type, tmp_path)
    prefill, scarce = Failing(engine_of(tmp_path)), Failing(engine_of(tmp_path, num_blocks=NUM_SCARCE_BLOCKS))
    await assert_equal(Engines(prefill, engine_of(tmp_path), scarce), model)  # type: ignore[arg-type]
    assert min(prefill.num_steps, scarce.num_steps) >= 9


@pytest.mark.parametrize("is_at_launch", [True, False])
def test_a_sequence_that_joins_a_step_ahead_is_computed_again_if_the_step_is_lost(
    hybrid: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch, is_at_launch: bool
) -> None:
    """The step has replaced its states. It is lost because it fails, or because taking in the tokens before it does."""
    engine, prompt = engine_of(hybrid[0], run_ahead="on"), PROMPT[::-1]
    rig = Rig(engine)
    rig.local("a", PROMPT, greedy(20))
    rig.step()
    rig.add("b", prompt, greedy(20))
    launch = engine.launch

    def fail(*given: Any) -> None:
        if is_at_launch:
            launch(*given)
        raise RuntimeError("made to fail")

    owner, name = (engine, "launch") if is_at_launch else (rig.scheduler, "postprocess")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        rig.step(breaks=True)
    assert ("b", 1) in rig.engine.rows[-1]
    assert rig.run()["b"] == generate(hybrid[1], prompt, 20)[0]


def test_a_request_that_breaks_steps_ends_though_it_begins_again_in_several(
    hybrid: tuple[Path, PreTrainedModel],
) -> None:
    """Of its steps only the last one fails. The earlier ones do not clear it."""
    broken = {"broken": BrokenOnceAsked(52)}
    rig = Rig(engine_of(hybrid[0], block_size=64, num_blocks=16, processors=broken), max_batched_tokens=16)
    rig.local("bad", PROMPT, greedy(20, processors=("broken",)))
    rig.local("good", PROMPT[::-1], greedy(40))
    while rig.worker.has_work() and rig.count("failed_steps") < 10:
        rig.step(breaks=True)
    assert rig.failed == ["bad"]
    assert rig.outputs["good"] == generate(hybrid[1], PROMPT[::-1], 40)[0]


def test_states_and_keys_come_back_from_the_hosts_memory(hybrid: tuple[Path, PreTrainedModel]) -> None:
    """A prefill worker's pool holds one prompt. Tokens behind blocks that came back are those of the model itself."""
    engine = engine_of(hybrid[0], block_size=4, num_blocks=16, max_batched_tokens=16)
    told: Counter[str] = Counter()
    memory = memoryview(mmap.mmap(-1, 200 * engine.store.block_nbytes))

    def tier_of(blocks: BlockManager) -> HostTier:
        geometry, tell = engine.card.layout.geometry, lambda event, number: told.update({event: number})
        tiers.append(HostTier(engine.store, blocks, geometry, memory, tell=tell, on_returned=lambda: None))
        return tiers[0]

    tiers: list[HostTier] = []
    rig = ModelRig(engine, tier_of=tier_of, max_batched_tokens=16)
    for turn in range(3):
        for first in range(5):
            prompt = [*PROMPT[first:], *range(5, 5 + turn)]
            name = f"{turn} {first}"
            rig.local(name, prompt, Sampling(max_tokens=1, temperature=0.0))
            while rig.worker.has_work():
                rig.worker.step()
                tiers[0].work()
            rig.run()
            while tiers[0].work():
                pass
            assert rig.tokens[name] == generate(hybrid[1], prompt, 1)[0][0]
    assert told["tokens"] >= 8 * 36
    assert told["wrong"] == 0


@pytest.fixture(scope="module")
def engine(hybrid: tuple[Path, PreTrainedModel]) -> TorchEngine:
    return engine_of(hybrid[0], block_size=32)


def test_memory_is_measured_with_a_copy_of_every_sequences_states(
    hybrid: tuple[Path, PreTrainedModel], engine: TorchEngine
) -> None:
    steps: list[Batch] = []

    class Ops(CpuPagedOps):
        def begin_step(self, batch: Batch) -> CpuPagedStep:
            steps.append(batch)
            return super().begin_step(batch)

    model: Any = engine._model
    run_largest_step(
        model.shape,
        lambda pool, *_: (model, Ops(model.shape, pool.tensor)),  # type: ignore[arg-type]
        torch.float32,
        torch.device("cpu"),
        options_of(hybrid[0], max_num_seqs=5, max_batched_tokens=20),
    )
    assert [(len(step.token_ids), step.num_decode_rows) for step in steps] == [(20, 0), (5, 5)]


def test_speculation_is_refused(engine: TorchEngine) -> None:
    settings = DecodeSchedulerSettings(speculation="ngram")
    with pytest.raises(SettingsError, match=r"--speculation is ngram, but the model has recurrent layers"):
        DecodeWorker(engine, settings, ADDRESS, worker_setup("decode"))


def test_steps_shorter_than_a_block_are_refused(engine: TorchEngine) -> None:
    settings = PrefillSchedulerSettings(max_batched_tokens=31)
    with pytest.raises(SettingsError, match=r"--max-batched-tokens is 31; .*whole blocks, of 32 tokens"):
        PrefillWorker(engine, settings, worker_setup("prefill"))


@pytest.mark.parametrize("model_type", ["jamba", "rwkv", "recurrent_gemma"])
def test_other_recurrent_layers_are_refused(model_type: str, tmp_path: Path) -> None:
    saved(model_type, tmp_path)
    with pytest.raises(ModelError, match=r"in the middle of a prompt|keeps a state in its own way"):
        engine_of(tmp_path)


def test_a_layer_that_computes_single_tokens_in_another_way_is_refused(
    hybrid: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has code of its own for a single token, which prompts alone would not show."""
    monkeypatch.setattr(modeling_qwen3_next, "causal_conv1d_update", lambda inputs, *_, **__: inputs)
    with pytest.raises(ModelError, match=r"is not what transformers computes"):
        engine_of(hybrid[0])


def test_blocks_are_as_large_as_states_want_them(hybrid: tuple[Path, PreTrainedModel]) -> None:
    geometry = engine_of(hybrid[0], may_widen_blocks=True).card.layout.geometry
    assert geometry == outline_model(hybrid[0], "transformers", None).geometry
    assert geometry.block_size == 64
    assert [group.kind for group in geometry.groups] == [GroupKind.FULL, GroupKind.STATE]
