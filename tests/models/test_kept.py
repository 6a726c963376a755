"""Models of transformers whose quantised weights stay stored: logits equal those of full weights, and nothing full is left.

The GPU's operations run in Triton's interpreter.
"""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.engine.backends.cuda.linear import can_multiply
from kvrelay.engine.backends.cuda.ops import CudaPagedOps
from kvrelay.engine.kv.geometry import geometry_of
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.models.hf import loading
from kvrelay.engine.models.hf.check import Prompt, paged_logits, plain_logits
from kvrelay.engine.models.hf.kept import KeptParameters
from kvrelay.engine.models.hf.loading import load_model
from kvrelay.engine.models.hf.model import TransformersModel
from tests.engine.conftest import tokens
from tests.engine.weights.stored_models import FORMATS, HALF
from tests.engine.weights.storing import Tensors, store

from .test_types import saved

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers warns of what tiny configurations leave out
    pytest.mark.skipif(torch.cuda.is_available(), reason="weights on a CPU, and kernels in the interpreter"),
    pytest.mark.timeout(300),  # a case takes seconds on a quiet machine
]
CPU = torch.device("cpu")
GROUP = 32  # inputs of a group in all formats
PROMPT = tokens(1, 9)
ATTENTION = {f"layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qkvo"}
MLP = ("gate_proj", "up_proj", "down_proj")
EXPERTS = {f"layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")}


def save_stored(model_type: str, name: str, directory: Path, but: str = " ") -> Path:
    """Save a tiny model of two layers in a format: all matrices that its groups divide, except modules with ``but`` in their
    names, head and routers."""
    saved(model_type, directory / "full", num_hidden_layers=2)
    quantization, make = FORMATS[name]

    def of(module: str, weight: torch.Tensor) -> Tensors | None:
        is_layer = "layers." in module and not module.endswith(("gate", "router")) and but not in module
        return make(weight) if is_layer and not any(size % GROUP for size in weight.shape) else None

    return store(directory / "full", directory / "stored", quantization, of)


def load(directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[TransformersModel, KeptParameters]:
    """The model with stored weights, and which these are."""
    found: list[KeptParameters] = []
    put_kept = loading.put_kept

    def put(model: Any, kept: KeptParameters, *args: Any) -> None:
        found.append(kept)
        put_kept(model, kept, *args)

    monkeypatch.setattr(loading, "put_kept", put)
    model = load_model(directory, HALF, CPU, keeps=partial(can_multiply, has_e4m3=True))
    return model, *found


@torch.inference_mode()
def plain(model: TransformersModel) -> torch.Tensor:
    """transformers' own logits of the prompt, ``[its length, vocab]``."""
    with model.plain_attention():
        positions = torch.arange(len(PROMPT))[None]
        logits: torch.Tensor = model.model(torch.tensor([PROMPT]), position_ids=positions, use_cache=False).logits[0]
        return logits.float()


@torch.inference_mode()
def bound(model: TransformersModel) -> torch.Tensor:
    """The same by the GPU's operations."""
    pool = KvPool(geometry_of(model.shape, 8, HALF), 1, CPU).tensor
    model.bind(CudaPagedOps(model.shape, pool, 8, 1), HALF)
    (logits,) = paged_logits(
        model, model.shape, [Prompt(PROMPT)], lambda *of: (model, CudaPagedOps(*of)), HALF, len(PROMPT)
    )
    return logits.float()


def num_bytes_alive() -> int:
    """Of the memory of all tensors."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and not one.is_meta]
    storages = {storage.data_ptr(): storage.nbytes() for storage in (one.untyped_storage() for one in tensors)}
    return sum(storages.values())


CASES = [
    ("glm4_moe", "fp8-blocks", {*ATTENTION, *EXPERTS} | {f"layers.0.mlp.{name}" for name in MLP}),
]


@pytest.mark.parametrize(("model_type", "name", "paths"), CASES)
def test_stored_weights_stay(
    model_type: str, name: str, paths: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_stored(model_type, name, tmp_path)
    full = load_model(directory, HALF, CPU)
    wanted, wanted_by_check = plain(full), plain_logits(full)
    model, kept = load(directory, monkeypatch)
    print(sorted(kept.origins))
    # The reference of the check at load is that of full weights, bit by bit.
    assert torch.equal(plain(model), wanted)
    assert all(map(torch.equal, plain_logits(model), wanted_by_check))
    found = bound(model)
    print((found - wanted).norm() / wanted.norm())
    assert (found - wanted).norm() < 5e-3 * wanted.norm()
