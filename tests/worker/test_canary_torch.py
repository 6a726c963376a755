"""The canary on a real model: its answer is the same each time, and one flipped bit of a weight changes it.

The bit may also be in a packed weight, or in the memory of another rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.backends.cpu import ops as cpu_ops
from kvrelay.engine.backends.cpu.linear import NativeLinear, PackedLinear
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.owners import sequence_owner
from kvrelay.engine.step.interface import Engine, StepRow
from kvrelay.engine.step.leader import Leader
from kvrelay.engine.step.sequence import Sequence, SequenceStatus
from kvrelay.engine.torch_engine import TorchEngine
from kvrelay.worker.canary import Canary, CanaryPlan
from tests.bit_flips import flip_bit
from tests.engine.conftest import SIZES, load, save_model
from tests.engine.ranks.conftest import load_ranks
from tests.engine.ranks.rig import pids


@pytest.fixture(params=["bfloat16", "float32"])
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TorchEngine:
    """An engine whose weights are plain tensors, because a test cannot change a bit of a weight that oneDNN has packed."""
    monkeypatch.setattr(cpu_ops, "has_packed_linear", lambda dtype: False)
    save_model(tmp_path, transformers.LlamaConfig(**SIZES))
    return load(tmp_path, num_blocks=32, block_size=8, dtype=request.param)


class Rig:
    def __init__(self, engine: Engine) -> None:
        self.blocks = BlockManager(32, 8, lambda: 0.0)
        self.leader = Leader(engine)
        self._canary = Canary(CanaryPlan(0.0, 512, 4), self.leader, self.blocks, lambda: 0.0)

    def run(self) -> bool | None:
        verdict = self._canary.step()
        while self._canary.is_under_way:
            verdict = self._canary.step()
        return verdict

    def compute_others(self) -> None:
        """Compute two other sequences, and release their blocks."""
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
    """The test flips the top bit of an exponent in one number of each tensor that every token meets."""
    rig = Rig(engine)
    assert rig.run() is True
    tensors = _tensors(engine)
    assert len(tensors) > 10, tensors.keys()
    for name, tensor in tensors.items():
        with torch.inference_mode():
            _flip(tensor)
            assert rig.run() is False, f"a bit of {name} changed nothing"
            _flip(tensor)
        assert rig.run() is True, f"{name} is as before"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_flipped_bit_of_a_packed_weight_is_found(tmp_path: Path, dtype: str) -> None:
    """Memory of oneDNN cannot be changed, so the test unpacks such a weight, flips a bit and packs it again."""
    save_model(tmp_path, transformers.LlamaConfig(**SIZES))
    engine = load(tmp_path, num_blocks=32, block_size=8, dtype=dtype)
    rig = Rig(engine)
    assert rig.run() is True
    packed = [one for one, _ in _things(engine._model) if isinstance(one, PackedLinear | NativeLinear)]
    if not packed:
        pytest.skip(f"weights in {dtype} are not packed on this machine")
    for linear in packed:
        flip = _flipped_panel(linear) if isinstance(linear, NativeLinear) else _flipped(linear)
        with torch.inference_mode(), flip:
            assert rig.run() is False, f"a bit of {linear} changed nothing"
        assert rig.run() is True, f"{linear} is as before"


@contextlib.contextmanager
def _flipped(linear: PackedLinear) -> Iterator[None]:
    before, dense = linear._weight, linear._weight.to_dense()
    _flip(dense)
    linear._weight = torch.ops.mkldnn._reorder_linear_weight(dense)
    yield
    linear._weight = before


@contextlib.contextmanager
def _flipped_panel(linear: NativeLinear) -> Iterator[None]:
    _flip(linear._panels)
    yield
    _flip(linear._panels)


def test_a_bit_that_flips_in_the_memory_of_another_rank_is_found(tmp_path: Path) -> None:
    model = save_model(tmp_path, transformers.LlamaConfig(**SIZES))
    norm = model.model.layers[1].post_attention_layernorm.weight
    with torch.no_grad():
        norm.uniform_(0.5, 1.5)
    model.save_pretrained(tmp_path)
    engine = load_ranks(tmp_path, 2, num_blocks=32, block_size=8, dtype="float32")
    try:
        rig = Rig(engine)
        assert rig.run() is True
        [rank] = pids()
        content = norm.detach().numpy().tobytes()
        for verdict in (False, True):  # flipped, then flipped back
            assert flip_bit(rank, content, _EXPONENT_BIT) > 0
            content = _with_flipped(content, _EXPONENT_BIT)
            assert rig.run() is verdict
    finally:
        engine.close()


_EXPONENT_BIT = 30  # of the first number of a float32 vector


def _with_flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _flip(tensor: torch.Tensor) -> None:
    """Flip the top exponent bit of the number in the middle."""
    size = tensor.element_size()
    bits = tensor.reshape(-1).view({2: torch.int16, 4: torch.int32}[size])
    bits[tensor.numel() // 2] ^= 1 << (8 * size - 2)


def _tensors(engine: TorchEngine) -> dict[str, torch.Tensor]:
    """The model's floating tensors with two numbers or more. Embeddings are left out, as only some tokens meet them."""
    found = {
        name: thing
        for thing, name in _things(engine._model)
        if isinstance(thing, torch.Tensor) and thing.is_floating_point() and thing.is_contiguous() and thing.numel() > 1
    }
    skipped = ("embed", "pool", "rope", "cos", "sin", "_ops")
    return {name: one for name, one in found.items() if not any(word in name for word in skipped)}


def _things(model: object) -> list[tuple[object, str]]:
    """All objects that a model consists of, with their names."""
    found: dict[int, tuple[object, str]] = {}

    def visit(name: str, thing: object) -> None:
        if id(thing) in found:
            return
        found[id(thing)] = (thing, name)
        if isinstance(thing, list | tuple):
            for index, one in enumerate(thing):
                visit(f"{name}.{index}", one)
        elif isinstance(thing, dict):
            for key, one in thing.items():
                visit(f"{name}.{key}", one)
        elif type(thing).__module__.startswith("kvrelay"):
            names = [one for cls in type(thing).__mro__ for one in getattr(cls, "__slots__", ())]
            for key in [*getattr(thing, "__dict__", {}), *names]:
                visit(f"{name}.{key}", getattr(thing, key, None))

    visit("model", model)
    return list(found.values())
