"""Tiny models in every quantised format: log probabilities equal transformers' with its own dequantised weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.cut import Cut
from kvrelay.engine.config.model import load_config
from kvrelay.engine.step.interface import Engine, StepRow
from kvrelay.engine.weights.checkpoint import load_weights
from tests.engine import conftest as native
from tests.engine.led import step
from tests.engine.weights.storing import Tensors, awq, gptq, integers, store

from .test_types import engine_of
from .tiny import VOCAB, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' and compressed-tensors' own
PROMPT = native.tokens(3, 21)
Make = Callable[[torch.Tensor], Tensors]


@dataclass(frozen=True)
class Format:
    """How a projection is stored, how the checkpoint describes it, and how transformers dequantises it."""

    quantization: dict[str, Any]
    make: Make
    theirs: Any = None  # transformers' quantization_config; None if it needs a GPU or another library
    full: Callable[[torch.Tensor], torch.Tensor] | None = None  # the weights as dequantised, where ``theirs`` is None


def compressed(compressor: Any, name: str, activations: bool = False, **given: Any) -> Format:
    """A format of compressed-tensors, written and read by that library."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**given))

    def make(weight: torch.Tensor) -> Tensors:
        num_outs, num_ins = weight.shape
        match given["strategy"]:
            case "tensor":
                largest = weight.abs().max().reshape(1)
            case "channel":
                largest = weight.abs().amax(dim=1, keepdim=True)
            case "group":
                largest = weight.view(num_outs, -1, given["group_size"]).abs().amax(dim=2)
            case "block":
                blocks = weight.view(num_outs // 16, 16, num_ins // 16, 16)
                largest = blocks.abs().amax(dim=(1, 3))
        top = 448.0 if given["type"] == "float" else 2.0 ** (given["num_bits"] - 1) - 1
        tensors = {"weight": weight, "weight_scale": largest / top}
        if not given.get("symmetric", True):
            tensors["weight_zero_point"] = torch.full_like(largest, 1).to(torch.int8)
        stored: Tensors = compressor.compress(tensors, scheme)
        return {part: tensor.contiguous() for part, tensor in stored.items()}

    group = json.loads(scheme.model_dump_json())
    if activations:
        group["input_activations"] = {**given, "strategy": "token", "dynamic": True, "symmetric": True}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": name}},
        "ignore": ["lm_head", "model.layers.1.mlp.down_proj"],
    }
    return Format(quantization, make, transformers.CompressedTensorsConfig(run_compressed=False))


def blocks_of_fp8(weight: torch.Tensor) -> Tensors:
    """Blocks of 16 by 16, as DeepSeek stores them."""
    num_outs, num_ins = weight.shape
    blocks = weight.view(num_outs // 16, 16, num_ins // 16, 16)
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    values = (blocks / scale[:, None, :, None]).view(weight.shape).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": scale}


DEEPSEEK_V4 = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}


def power_of_two(largest: torch.Tensor) -> torch.Tensor:
    """The least power of two that is not smaller."""
    return largest.log2().ceil().exp2()


def deepseek_v4(module: str, weight: torch.Tensor) -> Tensors | None:
    """As published: experts in e2m1, two numbers in a byte, other projections but those of compressors in e4m3, in blocks of 32.
    Scales are powers of two.
    """
    num_outs, num_ins = weight.shape
    if ".experts." in module:
        groups = weight.view(num_outs, -1, 32)
        scale = power_of_two(groups.abs().amax(dim=-1) / 6)
        e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        nearest = ((groups.abs() / scale[..., None])[..., None] - e2m1).abs().argmin(dim=-1) + 8 * (groups < 0)
        first, second = nearest.view(num_outs, -1, 2).to(torch.uint8).unbind(dim=-1)
        return {"weight": (first | second << 4).view(torch.int8), "scale": scale.to(torch.float8_e8m0fnu)}
    if ".compressor." in module or not module.rpartition(".")[2].startswith("w") or num_outs % 32 or num_ins % 32:
        return None
    blocks = weight.view(num_outs // 32, 32, num_ins // 32, 32)
    scale = power_of_two(blocks.abs().amax(dim=(1, 3)) / 448)
    values = (blocks / scale[:, None, :, None]).view(weight.shape).to(torch.float8_e4m3fn)
    return {"weight": values, "scale": scale.to(torch.float8_e8m0fnu)}


def fp8_of_modelopt(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().max() / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale, "input_scale": torch.tensor(0.1)}


def as_integers(bits: int, pack: Callable[..., Tensors], quantization: dict[str, Any], **given: Any) -> Format:
    def ints(weight: torch.Tensor) -> Any:
        return integers(weight, bits, 16, **given)

    packing = (bits,) if pack is gptq else ()
    return Format(quantization, lambda weight: pack(ints(weight), *packing), full=lambda weight: ints(weight).full())


INT4 = {"num_bits": 4, "type": "int"}
INT8 = {"num_bits": 8, "type": "int"}
FP8 = {"num_bits": 8, "type": "float"}
GPTQ = {"quant_method": "gptq", "group_size": 16}
FORMATS = {
    "fp8-blocks": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16], "fmt": "e4m3"},
        blocks_of_fp8,
        transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(16, 16)),
    ),
    "modelopt-fp8": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        fp8_of_modelopt,
        full=lambda weight: fp8_of_modelopt(weight)["weight"].float() * fp8_of_modelopt(weight)["weight_scale"],
    ),
    "ct-fp8": compressed(FloatQuantizationCompressor, "float-quantized", True, **FP8, strategy="tensor"),
    "ct-fp8-channels": compressed(FloatQuantizationCompressor, "float-quantized", True, **FP8, strategy="channel"),
    "ct-fp8-blocks": compressed(
        FloatQuantizationCompressor, "float-quantized", **FP8, strategy="block", block_structure=[16, 16]
    ),
    "ct-w8a8": compressed(IntQuantizationCompressor, "int-quantized", True, **INT8, strategy="channel"),
    "ct-w4a16": compressed(PackedQuantizationCompressor, "pack-quantized", **INT4, strategy="group", group_size=16),
    "ct-w4a16-asymmetric": compressed(
        PackedQuantizationCompressor, "pack-quantized", **INT4, strategy="group", group_size=16, symmetric=False
    ),
    "ct-w8a16": compressed(PackedQuantizationCompressor, "pack-quantized", **INT8, strategy="channel"),
    "gptq": as_integers(4, gptq, {**GPTQ, "bits": 4, "sym": True, "desc_act": False}, symmetric=True),
    "gptq-act-order": as_integers(
        4, gptq, {**GPTQ, "bits": 4, "sym": False, "desc_act": True}, symmetric=False, shuffled=True
    ),
    "gptq-8-bits": as_integers(8, gptq, {**GPTQ, "bits": 8, "sym": True}, symmetric=True),
    "awq": as_integers(
        4, awq, {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}, symmetric=False
    ),
}


def is_stored(module: str) -> bool:
    """Whether a module is quantised: all projections but one."""
    return module.endswith("_proj") and not module.endswith("layers.1.mlp.down_proj")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    native.save_model(directory, transformers.LlamaConfig(**native.SIZES))
    return directory


def stored(source: Path, target: Path, made: Format) -> Path:
    """Save the model in a format."""
    return store(
        source, target, made.quantization, lambda module, weight: made.make(weight) if is_stored(module) else None
    )


def reference(source: Path, directory: Path, made: Format) -> torch.Tensor:
    """transformers' log probabilities after the prompt, ``[vocab]``."""
    return logits_of(dequantised(source, directory, made))


def dequantised(source: Path, directory: Path, made: Format) -> Any:
    """transformers' model with full weights."""
    if made.theirs is not None:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, quantization_config=made.theirs, dtype=torch.float32
        )
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        assert made.full is not None
        for name, linear in model.named_modules():
            if isinstance(linear, torch.nn.Linear) and is_stored(name):
                linear.weight.data = made.full(linear.weight.data)
    return model


@torch.inference_mode()
def logits_of(model: Any) -> torch.Tensor:
    """A model's log probabilities after the prompt."""
    logits: torch.Tensor = model(torch.tensor([PROMPT]), use_cache=False).logits[0, -1]
    return torch.log_softmax(logits.float(), dim=-1)


def ours(engine: Engine, adapter: int = 0) -> torch.Tensor:
    """The engine's log probabilities after the prompt."""
    num_blocks = -(-len(PROMPT) // engine.card.layout.block_size)
    num_groups = len(engine.card.layout.geometry.groups)
    sequence = native.sequence(PROMPT, list(range(num_blocks)), num_groups=num_groups, num_logprobs=VOCAB)
    sequence.adapter = adapter
    (token,) = step(engine, [StepRow(sequence, len(PROMPT))])
    assert token is not None
    dense = torch.full((VOCAB,), -math.inf)
    for token_id, value in token.top_logprobs:
        dense[token_id] = value
    return dense


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_gives_the_logits_of_its_dequantised_weights(name: str, llama: Path, tmp_path: Path) -> None:
    made = FORMATS[name]
    directory = stored(llama, tmp_path, made)
    wanted = reference(llama, directory, made)
    plain = logits_of(transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32))
    assert (wanted - plain).abs().max() > 1e-3  # the format changes the result
    torch.testing.assert_close(ours(native.load(directory, dtype="float32")), wanted, rtol=0, atol=2e-4)
    torch.testing.assert_close(ours(engine_of(directory)), wanted, rtol=0, atol=2e-4)


def test_ranks_have_their_parts_of_stored_weights(llama: Path, tmp_path: Path) -> None:
    directory = stored(llama, tmp_path, FORMATS["awq"])
    config = load_config(directory)
    whole, *ranks = (
        load_weights(directory, config, torch.float32, torch.device("cpu"), lambda *_: None, cut=cut)
        for cut in (Cut(), Cut(0, 2), Cut(1, 2))
    )
    downs = [one.layers[0].mlp.down for one in ranks]
    keys = [one.layers[0].attention.qkv[48:64] for one in ranks]  # after three query heads of 16
    assert torch.equal(torch.cat(downs, dim=1), whole.layers[0].mlp.down)
    assert torch.equal(torch.cat(keys), whole.layers[0].attention.qkv[96:128])


def test_experts_of_fp8_through_transformers(tmp_path: Path) -> None:
    source = tmp_path / "full"
    tiny_model("qwen3_moe").save_pretrained(source)
    made = FORMATS["fp8-blocks"]
    directory = stored(source, tmp_path / "fp8", made)
    assert any("experts.0.up_proj.weight_scale_inv" in name for name in load_file(directory / "model.safetensors"))
    torch.testing.assert_close(ours(engine_of(directory)), reference(source, directory, made), rtol=0, atol=2e-4)


def test_deepseek_v4_as_it_is_published(tmp_path: Path) -> None:
    source, directory = tmp_path / "full", tmp_path / "published"
    tiny_model("deepseek_v4", expert_dtype="fp4").save_pretrained(source)
    store(source, directory, DEEPSEEK_V4, deepseek_v4)
    theirs = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(32, 32))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=theirs, dtype=torch.float32
    )
    full = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert (logits_of(full) - logits_of(model)).abs().max() > 1e-3
    torch.testing.assert_close(ours(engine_of(directory)), logits_of(model), rtol=0, atol=2e-4)


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    source, directory = tmp_path / "full", tmp_path / "mxfp4"
    tiny_model("gpt_oss").save_pretrained(source)
    store(source, directory, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, lambda *_: None)
    generator = torch.Generator().manual_seed(6)
    held: Tensors = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            num_experts, num_ins, num_outs = tensor.shape
            blocks = torch.randint(0, 256, (num_experts, num_outs, num_ins // 32, 16), generator=generator)
            scales = torch.randint(120, 126, blocks.shape[:-1], generator=generator)
            held |= {f"{name}_blocks": blocks.to(torch.uint8), f"{name}_scales": scales.to(torch.uint8)}
        else:
            held[name] = tensor
    save_file(held, directory / "model.safetensors", metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    for engine in (engine_of(directory), native.load(directory, dtype="float32")):
        torch.testing.assert_close(ours(engine), logits_of(model), rtol=0, atol=2e-4)


def test_biases_of_zeros_that_a_model_does_not_have_are_left_out(llama: Path, tmp_path: Path) -> None:
    """Older quantisers wrote biases of zeros for every module. Such a bias with other values is refused."""
    directory = stored(llama, tmp_path, FORMATS["gptq"])
    wanted = ours(native.load(directory, dtype="float32"))
    path = directory / "model.safetensors"
    held, name = load_file(path), "model.layers.0.self_attn.q_proj.bias"
    for value in (0.0, 1.0):
        save_file({**held, name: torch.full((96,), value)}, path, metadata={"format": "pt"})
        for load in (lambda: native.load(directory, dtype="float32"), lambda: engine_of(directory)):
            if value:
                with pytest.raises(ModelError, match=r"q_proj\.bias"):
                    load()
            else:
                torch.testing.assert_close(ours(load()), wanted, rtol=0, atol=2e-4)
