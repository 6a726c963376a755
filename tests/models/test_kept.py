"""Models of transformers whose quantised weights stay stored: logits equal those of full weights, and nothing full is left.

The GPU's operations run in Triton's interpreter.
"""

from __future__ import annotations

import gc
import re
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import transformers
from compressed_tensors.compressors import PackedQuantizationCompressor

from kvrelay.engine import transformers_engine
from kvrelay.engine.backends.cuda.linear import can_multiply
from kvrelay.engine.backends.cuda.ops import CudaPagedOps
from kvrelay.engine.kv.geometry import geometry_of
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.models.hf import loading
from kvrelay.engine.models.hf.check import Prompt, paged_logits, plain_logits
from kvrelay.engine.models.hf.kept import KeptParameters, put_kept
from kvrelay.engine.models.hf.loading import load_model
from kvrelay.engine.models.hf.model import TransformersModel
from kvrelay.engine.weights.stored import StoredWeight
from tests.adapters import linear_shapes, write_adapter
from tests.engine.conftest import tokens
from tests.engine.models.test_mistral4 import save_published
from tests.engine.weights.stored_models import FORMATS, HALF, save_gpt_oss
from tests.engine.weights.storing import Tensors, store

from .played_ranks import ThreadedRanks
from .test_quantised import DEEPSEEK_V4, INT4, compressed, deepseek_v4, ours
from .test_transformers_adapters import slots_of
from .test_types import engine_of, saved

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers warns of what tiny configurations leave out
    pytest.mark.skipif(torch.cuda.is_available(), reason="weights on a CPU, and kernels in the interpreter"),
    pytest.mark.timeout(300),  # a case takes seconds on a quiet machine
]
T = TypeVar("T")
W4A16 = compressed(PackedQuantizationCompressor, "pack-quantized", **INT4, strategy="group", group_size=32)
CPU = torch.device("cpu")
GROUP = 32  # inputs of a group in all formats
PROMPT = tokens(1, 9)
QKVO = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
MLP = {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
SHARED = {name.replace("mlp", "mlp.shared_experts") for name in MLP}
SINGLE_SHARED = {name.replace("mlp", "mlp.shared_expert") for name in MLP}
LATENT = {f"self_attn.{name}.weight" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}
EXPERTS = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
# Types, formats, and which parameters stay stored, by the ends of their names in the layers.
CASES = {
    "experts": ("glm4_moe", "fp8-blocks", QKVO | MLP | SHARED | EXPERTS),
    "other activation": ("gemma3_text", "awq", QKVO | MLP),
}
MORE_CASES = {
    "packed gate and up": (
        "phi3",
        "gptq-8-bits",
        {"self_attn.qkv_proj.weight", "self_attn.o_proj.weight", "mlp.gate_up_proj.weight", "mlp.down_proj.weight"},
    ),
    "recurrent": (
        "qwen3_next",
        "gptq",
        {"linear_attn.in_proj_qkvz.weight", "linear_attn.out_proj.weight"} | SINGLE_SHARED | EXPERTS,
    ),
    # Gate and up of an expert have orders of their own.
    "unordered experts": ("qwen2_moe", "gptq-act-order", QKVO | SINGLE_SHARED | {"mlp.experts.down_proj"}),
    "only experts": ("minimax_m2", "fp8-blocks", QKVO | EXPERTS),
    "compressed-tensors": ("glm4_moe", "w4a16", QKVO | MLP | SHARED | EXPERTS),
    "experts in one tensor": ("gpt_oss", "mxfp4", EXPERTS),
    "experts in fp4": ("deepseek_v4", "published", {"self_attn.o_b_proj.weight"} | SHARED | EXPERTS),
    "experts in one tensor, outputs first": ("mistral3", "mistral 4", LATENT | MLP | SHARED | EXPERTS),
    "images": ("gemma3", "awq", QKVO | MLP),
}


def save_stored(model_type: str, name: str, directory: Path, but: str = " ", **changes: Any) -> Path:
    """Save a tiny model of two layers in a format: all matrices that its groups divide, except modules with ``but`` in their
    names, head and routers. ``changes``: fields of its configuration."""
    if name == "mxfp4":
        save_gpt_oss(directory)
        return directory
    if name == "mistral 4":
        save_published(directory, num_hidden_layers=2)
        return directory
    if name == "published":
        layers = ["heavily_compressed_attention", "compressed_sparse_attention"]
        saved(model_type, directory / "full", num_hidden_layers=2, layer_types=layers, expert_dtype="fp4")
        return store(directory / "full", directory / "stored", DEEPSEEK_V4, deepseek_v4)
    saved(model_type, directory / "full", num_hidden_layers=2, **changes)
    quantization, make = FORMATS.get(name, (W4A16.quantization, W4A16.make))

    def of(module: str, weight: torch.Tensor) -> Tensors | None:
        is_layer = "layers." in module and not module.endswith(("gate", "router")) and but not in module
        return make(weight) if is_layer and not any(size % GROUP for size in weight.shape) else None

    return store(directory / "full", directory / "stored", quantization, of)


def load(directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[TransformersModel, KeptParameters]:
    """The model with stored weights, and which these are."""
    found: list[KeptParameters] = []

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
        CPU, model.shape, [Prompt(PROMPT)], lambda *of: (model, CudaPagedOps(*of)), HALF, len(PROMPT)
    )
    return logits.float()


def alive(kind: type[T]) -> list[T]:
    gc.collect()
    return [one for one in gc.get_objects() if isinstance(one, kind)]


def stored_bytes() -> int:
    """Bytes of all stored weights."""
    tensors = [
        tensor
        for one in alive(StoredWeight)
        for tensor in (one.values, one.scale, one.zero, one.order)
        if tensor is not None and not one.values.is_meta
    ]
    storages = {storage.data_ptr(): storage.nbytes() for storage in (one.untyped_storage() for one in tensors)}
    return sum(storages.values())


def full_weights(shapes: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The shapes of those full tensors that have one of these shapes, and memory."""
    found = [tuple(one.shape) for one in alive(torch.Tensor) if one.dtype == HALF and not one.is_meta]
    return [one for one in found if one in shapes]


def full_shapes(model: TransformersModel, kept: KeptParameters) -> set[tuple[int, ...]]:
    """The shapes of full weights, in the model and as our products would have them: gate and up in one, experts stacked."""
    shapes = {tuple(model.model.get_parameter(path).shape) for path in kept.origins}
    return shapes | {(2 * one[0], *one[1:]) for one in shapes} | {(one[0] * one[1], *one[2:]) for one in shapes}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(one, marks=pytest.mark.full) for one in MORE_CASES)])
def test_stored_weights_stay(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, name, ends = (CASES | MORE_CASES)[case]
    if name == "published":  # transformers keeps some projections in fp32 in a model in fp16, and then cannot compute
        monkeypatch.setattr(transformers.DeepseekV4PreTrainedModel, "_keep_in_fp32_modules", None)
        monkeypatch.setattr(loading, "require_dtype", lambda *_: None)
    directory = save_stored(model_type, name, tmp_path)
    full = load_model(directory, HALF, CPU)
    model, kept = load(directory, monkeypatch)
    assert {re.sub(r".*layers\.\d+\.", "", path) for path in kept.origins} == ends
    wanted, wanted_by_check, shapes = plain(full), plain_logits(full), full_shapes(full, kept)
    full_bytes = sum(full.model.get_parameter(path).nbytes for path in kept.origins)
    del full
    assert stored_bytes() == kept.nbytes < 0.8 * full_bytes
    # The reference of the check at load is that of full weights, bit by bit.
    assert torch.equal(plain(model), wanted)
    assert all(
        torch.equal(one.logits, two.logits) for one, two in zip(plain_logits(model), wanted_by_check, strict=True)
    )
    assert full_weights(shapes) == []
    found = bound(model)
    assert (found - wanted).norm() < 5e-3 * wanted.norm()
    assert full_weights(shapes) == []


def test_layers_that_share_weights_share_full_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"layers_block_type": ["hybrid"] * 2, "num_mem_blocks": 1, "tie_word_embeddings": True}
    directory = save_stored("zamba2", "fp8-blocks", tmp_path, **changes)
    full = load_model(directory, HALF, CPU)
    model, kept = load(directory, monkeypatch)
    first, second = (layer.shared_transformer.self_attn.q_proj.weight for layer in model.model.model.layers)
    assert first is second
    assert kept.origins
    assert torch.equal(plain(model), plain(full))


def test_on_a_cpu_all_weights_are_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save_stored("gemma3_text", "awq", tmp_path)
    monkeypatch.setattr(loading, "find_kept", None)
    engine_of(directory)


# Types, formats, changes of the configuration, and which part of the stored bytes a rank has at most.
RANKED: dict[str, tuple[str, str, dict[str, int], float]] = {
    "experts": ("glm4_moe", "fp8-blocks", {}, 0.6),
    "packed gate and up": ("phi3", "gptq-8-bits", {}, 0.85),  # attention stays whole
    "recurrent": ("qwen3_next", "gptq", {"linear_value_head_dim": 16}, 0.6),
    "recurrent, by kinds": (
        "qwen3_5_text",
        "fp8-blocks",
        {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
        0.6,
    ),
    "groups": ("qwen2_moe", "w4a16", {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}, 0.6),
}


@pytest.mark.parametrize("case", ["experts", *(pytest.param(one, marks=pytest.mark.full) for one in list(RANKED)[1:])])
def test_two_ranks_keep_their_parts(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's log probabilities are those of full weights, and no rank has a full weight."""
    model_type, name, changes, most = RANKED[case]
    directory = save_stored(model_type, name, tmp_path, **changes)
    wanted = ours(engine_of(directory, dtype="float32"))
    _, kept = load(directory, monkeypatch)
    shapes = full_shapes(load_model(directory, HALF, CPU), kept)
    found: list[KeptParameters] = []
    monkeypatch.setattr(
        loading, "put_kept", lambda model, kept, *args: (found.append(kept), put_kept(model, kept, *args))
    )
    monkeypatch.setattr(transformers_engine, "_ops_on", lambda *_: CudaPagedOps)
    monkeypatch.setattr(transformers_engine, "_kept_on", lambda _: partial(can_multiply, has_e4m3=True))
    with ThreadedRanks(directory, 2, monkeypatch, dtype="float16", block_size=8) as two:
        assert [len(one.origins) for one in found] == [len(kept.origins)] * 2
        assert full_weights(shapes) == []
        assert max(one.nbytes for one in found) < most * kept.nbytes
        assert (ours(two) - wanted).norm() < 5e-3 * wanted.norm()  # type: ignore[arg-type]


@pytest.mark.full
def test_an_adapter_on_stored_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine loads, checks itself, and applies the adapter as one with full weights does in float32."""
    directory = save_stored("gemma3_text", "awq", tmp_path)
    adapter = write_adapter(tmp_path / "adapter", linear_shapes(tmp_path / "full"), rank=6, seed=4)
    full = engine_of(directory, adapter_bytes=1)
    monkeypatch.setattr(transformers_engine, "_ops_on", lambda *_: CudaPagedOps)
    monkeypatch.setattr(transformers_engine, "_kept_on", lambda _: partial(can_multiply, has_e4m3=True))
    kept = engine_of(directory, adapter_bytes=1, dtype="float16", block_size=8)
    for engine in (full, kept):
        slots_of(engine).load(3, tmp_path / "adapter", adapter.digest)
    base, wanted = ours(full), ours(full, 3)
    assert (wanted - base).abs().max() > 0.1, "the adapter changes nothing"
    for number, expected in ((0, base), (3, wanted)):
        assert (ours(kept, number) - expected).norm() < 5e-3 * expected.norm()
