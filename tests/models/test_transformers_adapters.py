"""Adapters on models that run through transformers: the tokens of merged models, or a refusal by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from kvrelay.common.adapter_files import CONFIG_FILE, WEIGHTS_FILE, AdapterError, AdapterRef
from kvrelay.engine import transformers_engine
from kvrelay.engine.backends.cuda.ops import CudaPagedOps
from kvrelay.engine.models.hf.text import text_decoder
from kvrelay.engine.step.interface import AdapterSlots, Engine
from tests.adapters import write_adapter
from tests.engine.models.test_adapters import NUM_TOKENS, generate
from tests.engine.ranks.conftest import load_ranks

from .test_types import EQUAL, again, engine_of, saved
from .tiny_multimodal import text_type

# One product for queries, keys and values; Conv1D; softcaps and an unchanged MLP; experts; parallel layers; latents.
TYPES = ("phi3", "gpt2", "gemma2", "qwen3_moe", "gpt_neox", "cohere2", "deepseek_v3")
MORE = [*sorted(name for name in EQUAL - {*TYPES, "mamba2"} if text_type(name) == name), "mistral3", "qwen3_vl"]
RANKED = (
    "phi3",
    "starcoder2",
    "gpt_neox",
    # With shared experts, states, and attention that stays whole.
    *(pytest.param(name, marks=pytest.mark.full) for name in ("glm4_moe", "qwen3_next", "olmo2")),
)  # with biases, gate and up in one layer, and adapters for all kinds of parts
OTHERS = (".experts.", "vision_embed", "modality_router")  # modules that see some tokens, no text, or all tokens twice
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),  # transformers warns of what tiny configurations leave out
]


def linear_layers(model: transformers.PreTrainedModel) -> dict[str, tuple[int, int]]:
    """The shapes (outputs, inputs) of the layers that adapters may change."""
    found: dict[str, tuple[int, int]] = {}
    decoder, _ = text_decoder(model)
    recurrent = [f"{name.rpartition('.')[0]}." for name, one in model.named_modules() if type(one) is nn.Conv1d]
    for name, module in model.named_modules():
        is_ours = name.startswith(f"{decoder}.") and not any(word in name for word in (*OTHERS, *recurrent))
        is_router = any(
            word in type(model.get_submodule(name.rpartition(".")[0])).__name__ for word in ("Router", "Gate")
        )
        if is_ours and not is_router and type(module) in (nn.Linear, Conv1D):
            found[name] = (
                (module.out_features, module.in_features) if type(module) is nn.Linear else module.weight.T.shape
            )
    return {name: tuple(shape) for name, shape in found.items()}  # type: ignore[misc]


def merged_with(model: transformers.PreTrainedModel, adapter: Path) -> transformers.PreTrainedModel:
    """A model with the weights ``W + scaling * B A``, by PEFT's formulas."""
    merged, tensors = copy.deepcopy(model), load_file(adapter / WEIGHTS_FILE)
    config = json.loads((adapter / CONFIG_FILE).read_text())
    scaling = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    with torch.no_grad():
        for key in [key for key in tensors if ".lora_A." in key]:
            module = merged.get_submodule(key.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            delta = scaling * (tensors[key.replace(".lora_A.", ".lora_B.")] @ tensors[key])
            module.weight += delta.T if type(module) is Conv1D else delta
    return merged


def adapters_of(model: transformers.PreTrainedModel, directory: Path) -> list[AdapterRef]:
    shapes = linear_layers(model)
    few = dict(list(shapes.items())[1::3])
    return [
        write_adapter(directory / "all", shapes, seed=1),
        write_adapter(directory / "few", few, rank=7, seed=2, use_rslora=True, fan_in_fan_out=True),
    ]


def slots_of(engine: Engine) -> AdapterSlots:
    assert engine.adapters is not None
    return engine.adapters


def merged_of(
    base: Path, model: transformers.PreTrainedModel, refs: list[AdapterRef], **options: Any
) -> list[list[int]]:
    """The tokens that models merged with each adapter generate, from the second prompt on."""
    found = []
    for index, ref in enumerate(refs, start=1):
        directory = base.with_name(f"merged-{ref.name}")
        merged_with(model, base.parent / ref.name).save_pretrained(directory)
        found += generate(again(directory, block_size=16, **options), [0] * (index + 1))[index:]
    return found


@pytest.mark.parametrize("model_type", [*TYPES, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)])
def test_a_batch_of_base_and_adapters_gives_what_merged_models_give(model_type: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    model = saved(model_type, base)
    refs = adapters_of(model, tmp_path)
    engine = engine_of(base, block_size=16, adapter_bytes=1)
    for slot, ref in enumerate(refs, start=1):
        slots_of(engine).load(slot, tmp_path / ref.name, ref.digest)
    found = generate(engine, [0, 1, 2])
    plain = again(base, block_size=16)
    assert plain.adapters is None
    of_base = generate(plain, [0] * 3)
    assert found == [of_base[0], *merged_of(base, model, refs)]
    assert found[1:] != of_base[1:], "the adapters change nothing"
    slots_of(engine).unload(1)
    slots_of(engine).load(1, tmp_path / "few", refs[1].digest)
    assert generate(engine, [0, 0, 1])[2] == found[2]


@pytest.mark.parametrize("model_type", RANKED)
def test_two_ranks_give_the_tokens_of_one(model_type: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    model = saved(model_type, base)
    refs = adapters_of(model, tmp_path)
    engine: Any = load_ranks(base, 2, backend="transformers", dtype="float32", adapters=str(tmp_path))
    try:
        for slot, ref in enumerate(refs, start=1):
            slots_of(engine).load(slot, tmp_path / ref.name, ref.digest)
        assert generate(engine, [0, 1, 2]) == [
            generate(again(base, block_size=16), [0])[0],
            *merged_of(base, model, refs),
        ]
    finally:
        engine.close()


REFUSED = {
    "experts": ("mixtral", "model.layers.0.mlp.experts.gate_up_proj", (192, 64)),
    "one expert": ("qwen3_moe", "model.layers.1.mlp.experts.2.gate_proj", (32, 64)),
    "router": ("mixtral", "model.layers.0.mlp.gate", (4, 64)),
    "head": ("gemma2", "lm_head", (199, 64)),
    "embedding": ("gpt2", "transformer.wte", (199, 64)),
    "projection of its own": ("phi3", "model.layers.0.self_attn.q_proj", (64, 64)),
    "another base": ("phi3", "model.layers.9.self_attn.qkv_proj", (128, 64)),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_adapter_may_change_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    model_type, name, shape = REFUSED[kind]
    saved(model_type, tmp_path / "base")
    ref = write_adapter(tmp_path / "a", {name: shape})
    slots = slots_of(engine_of(tmp_path / "base", adapter_bytes=1))
    with pytest.raises(AdapterError, match=f"no {name} in this model that an adapter may change"):
        slots.load(1, tmp_path / "a", ref.digest)


def test_an_adapter_for_other_sizes_is_refused(tmp_path: Path) -> None:
    saved("gpt2", tmp_path / "base")
    name = "transformer.h.0.attn.c_attn"
    ref = write_adapter(tmp_path / "a", {name: (64, 192)})  # the shape of GPT-2's checkpoint
    slots = slots_of(engine_of(tmp_path / "base", adapter_bytes=1))
    with pytest.raises(AdapterError, match=rf"{name} is for a base of shape \(64, 192\); this model's is \(192, 64\)"):
        slots.load(1, tmp_path / "a", ref.digest)


def test_a_layer_that_gets_some_tokens_is_not_adapted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer's rows are not the rows of the step, so an adapter's output would go to other sequences."""
    from transformers.models.phi3.modeling_phi3 import Phi3MLP  # noqa: PLC0415

    plain = Phi3MLP.forward

    def by_halves(mlp: Any, hidden: torch.Tensor) -> torch.Tensor:
        middle = hidden.shape[1] // 2
        return torch.cat((plain(mlp, hidden[:, :middle]), plain(mlp, hidden[:, middle:])), dim=1)

    monkeypatch.setattr(Phi3MLP, "forward", by_halves)
    saved("phi3", tmp_path / "base")
    slots = slots_of(engine_of(tmp_path / "base", adapter_bytes=1))
    for name, shape, is_served in (("self_attn.o_proj", (64, 64), True), ("mlp.down_proj", (64, 96), False)):
        module = f"model.layers.0.{name}"
        ref = write_adapter(tmp_path / name, {module: shape})
        if is_served:
            slots.load(1, tmp_path / name, ref.digest)
        else:
            with pytest.raises(AdapterError, match=f"no {module} in this model"):
                slots.load(2, tmp_path / name, ref.digest)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
@pytest.mark.parametrize(
    ("model_type", "heads"),
    [("phi3", {"num_attention_heads": 2, "head_dim": 32}), ("gpt2", {"n_head": 2, "num_attention_heads": 2})],
)
def test_our_cpu_kernels_give_a_row_the_same_bits_in_any_batch(
    model_type: str, heads: dict[str, int], tmp_path: Path
) -> None:
    model = saved(model_type, tmp_path / "base", **heads)
    refs = adapters_of(model, tmp_path)
    options = {"device": "cpu", "block_size": 16, "adapter_bytes": 1, "dtype": "bfloat16"}
    engine = engine_of(tmp_path / "base", cpu_kernels="native", **options)
    torch_engine = engine_of(tmp_path / "base", cpu_kernels="torch", **options)
    for one in (engine, torch_engine):
        for slot, ref in enumerate(refs, start=1):
            slots_of(one).load(slot, tmp_path / ref.name, ref.digest)
    together = generate(engine, [1, 2, 0, 1])
    assert generate(engine, [1, 2, 2, 1])[:2] == together[:2]
    assert generate(torch_engine, [1])[0][:2] == together[0][:2]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_our_triton_kernels_add_what_torch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels run in their interpreter, or on a GPU."""
    base = tmp_path / "base"
    model = saved("phi3", base, num_hidden_layers=1)
    refs = adapters_of(model, tmp_path)
    expected = [generate(again(base, block_size=16), [0])[0], *merged_of(base, model, refs)]
    is_cuda = torch.cuda.is_available()
    if not is_cuda:
        monkeypatch.setattr(transformers_engine, "_ops_on", lambda *_: CudaPagedOps)
    engine = engine_of(base, block_size=16, adapter_bytes=1, device="cuda" if is_cuda else "cpu")
    for slot, ref in enumerate(refs, start=1):
        slots_of(engine).load(slot, tmp_path / ref.name, ref.digest)
    assert generate(engine, [0, 1, 2]) == expected
    assert len(expected[0]) == NUM_TOKENS
    assert json.loads((tmp_path / "few" / "adapter_config.json").read_text())["use_rslora"]
