"""On a real model: the answer is the same each time, whatever was computed between, and one flipped bit of a weight changes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.backends.cpu import ops as cpu_ops
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.owners import sequence_owner
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.leader import Leader
from kvrelay.engine.step.sequence import Sequence, SequenceStatus
from kvrelay.engine.torch_engine import TorchEngine
from kvrelay.worker.canary import Canary, CanaryPlan
from tests.engine.conftest import SIZES, load, save_model


@pytest.fixture(params=["bfloat16", "float32"])
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TorchEngine:
    """With weights as plain tensors: nobody reaches a bit of those that oneDNN has packed."""
    monkeypatch.setattr(cpu_ops, "has_packed_linear", lambda dtype: False)
    save_model(tmp_path, transformers.LlamaConfig(**SIZES))
    return load(tmp_path, num_blocks=32, block_size=8, dtype=request.param)


class Rig:
    def __init__(self, engine: TorchEngine) -> None:
        self.blocks = BlockManager(32, 8, lambda: 0.0)
        self.leader = Leader(engine)
        self._canary = Canary(CanaryPlan(0.0, 512, 4), self.leader, self.blocks, lambda: 0.0)

    def run(self) -> bool | None:
        verdict = self._canary.step()
        while self._canary.is_under_way:
            verdict = self._canary.step()
        return verdict

    def compute_others(self) -> None:
        """A batch of two, in blocks that are given back."""
        rows = []
        for number in range(2):
            one = Sequence(str(number), 0, [5 + number] * 20, 20, SamplingParams(max_tokens=4, temperature=0.0), 0.0)
            allocation = self.blocks.allocate(sequence_owner(one.key), 3)
            assert allocation is not None
            one.block_tables = allocation.block_tables
            one.set_status(SequenceStatus.RUNNING)
            rows.append(StepRow(one, 20))
        self.leader.step(rows)
        for row in rows:
            row.sequence.set_status(SequenceStatus.FINISHED)
            self.blocks.release(sequence_owner(row.sequence.key))


def test_the_answer_is_the_same_each_time(engine: TorchEngine) -> None:
    rig = Rig(engine)
    for _ in range(4):
        assert rig.run() is True
        rig.compute_others()


def test_a_flipped_bit_of_any_kind_of_weight_is_found(engine: TorchEngine) -> None:
    """The top bit of an exponent, in one number of each tensor that every token meets."""
    rig = Rig(engine)
    assert rig.run() is True
    tensors = _tensors(engine)
    assert len(tensors) > 10, tensors.keys()
    for name, tensor in tensors.items():
        bits = tensor.reshape(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
        bit = 1 << (8 * tensor.element_size() - 2)
        place = tensor.numel() // 2
        with torch.inference_mode():
            bits[place] ^= bit
            assert rig.run() is False, f"a bit of {name} changed nothing"
            bits[place] ^= bit
        assert rig.run() is True, f"{name} is as before"


def _tensors(engine: TorchEngine) -> dict[str, torch.Tensor]:
    """All floating tensors of two numbers or more that the model reaches, without embeddings: only some tokens meet those."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()

    def visit(name: str, thing: object) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            if thing.is_floating_point() and thing.is_contiguous() and thing.numel() > 1:
                found[name] = thing
        elif isinstance(thing, list | tuple):
            for index, one in enumerate(thing):
                visit(f"{name}.{index}", one)
        elif isinstance(thing, dict):
            for key, one in thing.items():
                visit(f"{name}.{key}", one)
        elif type(thing).__module__.startswith("kvrelay"):
            names = [one for cls in type(thing).__mro__ for one in getattr(cls, "__slots__", ())]
            for key in [*getattr(thing, "__dict__", {}), *names]:
                visit(f"{name}.{key}", getattr(thing, key, None))

    visit("model", engine._model)
    skipped = ("embed", "pool", "rope", "cos", "sin", "_ops")
    return {name: one for name, one in found.items() if not any(word in name for word in skipped)}
