"""Adapters by the GPU's kernels in Triton's interpreter equal the reference, in steps and in graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from kvrelay.engine.backends.cuda.low_rank import tiles_of
from kvrelay.engine.models.low_rank import TokenGroups
from tests.adapters import linear_shapes, write_adapter
from tests.engine.backends.test_ops_cuda import run_interpreted
from tests.engine.conftest import SIZES, save_model

PRODUCTS = """
import numpy as np
import torch

from kvrelay.engine.backends.cuda.low_rank import CudaLowRank
from kvrelay.engine.models.low_rank import TokenGroups, TorchLowRank
from kvrelay.engine.step.uploads import Uploader
from kvrelay.engine.weights.adapters import LowRank
from kvrelay.kernels.linear.low_rank import FEW_ROWS, MANY_ROWS

torch.manual_seed(0)
device, dtype, inputs, widths = torch.device("cpu"), torch.float16, 72, (40, 8, 8)
ours, reference = CudaLowRank(Uploader(device).upload, dtype, device), TorchLowRank()
for products in (ours, reference):
    products.add_site(inputs, widths)
starts = np.cumsum((0, *widths)).tolist()
for slot, ranks in ((2, (16, 3, 1)), (5, (0, 40, 0)), (256, (8, 8, 8))):
    parts = [
        LowRank(start, torch.randn(rank, inputs).half() / 9, torch.randn(width, rank).half(), 0.1 * slot ** 0.5) if rank else None
        for start, width, rank in zip(starts, widths, ranks)
    ]
    for products in (ours, reference):
        products.put(slot, 0, parts)
for count, tiling in ((3, FEW_ROWS), (20, FEW_ROWS), (70, MANY_ROWS)):
    # The last three rows have none.
    slots, bounds = np.array([2, 5, 256]), np.array([0, count, count + 1, 3 * count])
    groups = TokenGroups(slots, bounds, np.random.default_rng(count).permutation(3 * count))
    hidden, before = torch.randn(3 * count + 3, inputs).half(), torch.randn(3 * count + 3, sum(widths)).half()
    found, expected = before.clone(), before.clone()
    for products, out in ((ours, found), (reference, expected)):
        products.begin_step(groups)
        products.add(0, hidden, out)
    assert ours._rows.tiling is tiling, (count, ours._rows.tiling)
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)
    assert (found[: 3 * count] != before[: 3 * count]).any(dim=1).all()
    assert torch.equal(found[3 * count :], before[3 * count :])
for products in (ours, reference):
    products.drop(2)
found = before.clone()
ours.add(0, hidden, found)
assert torch.equal(found[groups.tokens[:count]], before[groups.tokens[:count]])
print("same")
"""

ENGINE = """
import sys
from pathlib import Path

import torch

from kvrelay.engine import pool_and_card, torch_engine
from kvrelay.engine.backends.cuda.build import decode_graphs
from kvrelay.engine.backends.cuda.trial import compile_adapters
from kvrelay.engine.backends.cuda.low_rank import AdaptedSteps
from kvrelay.engine.backends.cuda.ops import CudaOps
from kvrelay.engine.backends.options import EngineOptions
from kvrelay.engine.config.model import load_config
from kvrelay.engine.kv.pool import KvPool
from tests.engine.models.test_adapters import generate

base, *adapters = map(Path, sys.argv[1:])
digests = [adapter.read_text() for adapter in (path / "digest" for path in adapters)]
options = EngineOptions(base, "tiny", device="cpu", num_blocks=16, max_num_seqs=3, max_model_len=64, adapter_bytes=1)
# The second leaves a row and a tile of the first one's graph without an adapter.
CASES = [1, 2, 0], [0, 0, 2], [0]
replays = []


class Recorder:
    # What a graph does, without a GPU: the same function on the same memory.
    def warm_up(self, run):
        run()

    def capture(self, run):
        index = len(replays)
        replays.append(0)

        def replay():
            # As in a capture: what runs is known, and asks nobody.
            replays[index] += 1
            products._rows, engine._adapters.is_on = held[index]
            run()
            engine._adapters.is_on = False

        held.append((products._rows, engine._adapters.is_on))
        return replay


def loaded(engine):
    for slot, (adapter, digest) in enumerate(zip(adapters, digests), start=1):
        engine.adapters.load(slot, adapter, digest)
    return engine


def load():
    return torch_engine.TorchEngine.load(options, lambda done, total: None)


held = []
expected = [generate(loaded(load()), slots) for slots in CASES]
torch_engine.cpu_ops = lambda options, *of: CudaOps(*of, options.max_num_seqs)
pool_and_card.KvPool = lambda *of, num_spare, staging, shared_memory: KvPool(*of, num_spare=1)
engine = load()
products = engine._adapters._products
adapted = AdaptedSteps(engine._adapters, products)
compile_adapters(engine._model, engine._ops, engine._pool, adapted)
engine._graphs = decode_graphs(
    load_config(base), engine._model, engine._ops, engine._pool, options, torch.float32, Recorder(), adapted
)
assert len(replays) == 6, replays  # of 3, 2 and 1 rows, without adapters and with
# Graphs serve what is loaded behind their capture.
loaded(engine)
given = [generate(engine, slots) for slots in CASES]
assert given == expected, (given, expected)
without, having = replays[::2], replays[1::2]
assert having[0] > 4, replays
assert without[2] > 2, replays
assert given[0][0] != given[1][0], "the adapter changes nothing"
print("same")
"""


def test_groups_are_cut_into_tiles_of_one_adapter() -> None:
    groups = TokenGroups(np.array([3, 4, 9]), np.array([0, 1, 34, 50]), np.arange(50))
    assert tiles_of(groups, 16).tolist() == [[3, 0, 1], [4, 1, 16], [4, 17, 16], [4, 33, 1], [9, 34, 16]]
    assert tiles_of(groups, 16).dtype == np.int32


def test_kernels_add_what_the_reference_adds(tmp_path: Path) -> None:
    """Groups of one to many rows, adapters that lack some layers, and rows without an adapter."""
    assert run_interpreted(PRODUCTS, tmp_path) == "same\n"


@pytest.mark.full
def test_steps_and_graphs_with_adapters_give_what_the_cpu_gives(tmp_path: Path) -> None:
    """Some adapters are loaded after the capture, and some rows have no adapter."""
    base = tmp_path / "base"
    save_model(base, transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1}), dtype=torch.float32)
    shapes = linear_shapes(base)
    few = {name: shape for name, shape in shapes.items() if not name.endswith(("k_proj", "down_proj"))}
    adapters = []
    for name, layers, rank in (("all", shapes, 5), ("few", few, 17)):
        adapters.append(tmp_path / name)
        ref = write_adapter(tmp_path / name, layers, rank=rank, seed=rank)
        (tmp_path / name / "digest").write_text(ref.digest)
    assert run_interpreted(ENGINE, base, *map(str, adapters)) == "same\n"
