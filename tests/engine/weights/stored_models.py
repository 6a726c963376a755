"""Tiny models of one layer in quantised formats, and their weights and logits as a GPU's worker has them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from kvrelay.engine.backends.cuda.linear import can_multiply
from kvrelay.engine.backends.cuda.ops import CudaOps
from kvrelay.engine.config.cut import Cut
from kvrelay.engine.config.model import load_config
from kvrelay.engine.models.decoder import DecoderModel
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.weights.checkpoint import load_weights
from kvrelay.engine.weights.parameters import ModelWeights
from tests.engine.conftest import SIZES, save_model, sequence, tokens
from tests.engine.led import batch_of
from tests.engine.weights.storing import Tensors, awq, gptq, integers, store

HALF = torch.float16  # Triton's interpreter multiplies bf16's raw bits
GPTQ = {"quant_method": "gptq", "bits": 4}


def fp8(weight: torch.Tensor) -> Tensors:
    """Blocks of 32 by 32."""
    num_outs, num_ins = weight.shape
    blocks = weight.view(num_outs // 32, 32, num_ins // 32, 32)
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    values = (blocks / scale[:, None, :, None]).view(weight.shape).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": scale}


def int8(weight: torch.Tensor) -> Tensors:
    """A scale for each channel."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


FORMATS: dict[str, tuple[dict[str, Any], Any]] = {
    "awq": ({"quant_method": "awq", "bits": 4}, lambda weight: awq(integers(weight, 4, 32, symmetric=False))),
    "awq by 96": (
        {"quant_method": "awq", "bits": 4},
        lambda weight: awq(integers(weight, 4, 96 if weight.shape[1] == 192 else 64, symmetric=False)),
    ),
    "gptq": (GPTQ, lambda weight: gptq(integers(weight, 4, 32, symmetric=True), 4)),
    "gptq-act-order": (GPTQ, lambda weight: gptq(integers(weight, 4, 32, symmetric=False, shuffled=True), 4)),
    "gptq-8-bits": ({**GPTQ, "bits": 8}, lambda weight: gptq(integers(weight, 8, 32, symmetric=False), 8)),
    "int8-channels": ({"quant_method": "compressed-tensors", "format": "int-quantized"}, int8),
    "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, fp8),
}


def save_llama(directory: Path) -> None:
    """Save a Llama whose 192 columns are cut for two ranks into 64 and 128, inside a group of 96."""
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 1, "num_attention_heads": 4}
    save_model(directory, transformers.LlamaConfig(**{**sizes, "initializer_range": 0.05, "head_dim": 32}))


def save_mixtral(directory: Path) -> None:
    """Save a Mixtral with four experts."""
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 1, "num_attention_heads": 4}
    save_model(
        directory,
        transformers.MixtralConfig(**{**sizes, "num_local_experts": 4, "head_dim": 32, "initializer_range": 0.05}),
    )


def save_in_format(source: Path, target: Path, name: str) -> Path:
    quantization, make = FORMATS[name]
    names = ("_proj", ".w1", ".w2", ".w3")
    return store(source, target, quantization, lambda module, weight: make(weight) if module.endswith(names) else None)


def load_stored(directory: Path, cut: Cut, *, keeps: bool = True) -> ModelWeights:
    keep = partial(can_multiply, has_e4m3=True) if keeps else None
    config = load_config(directory)
    return load_weights(directory, config, HALF, torch.device("cpu"), lambda *_: None, cut=cut, keeps=keep)


@torch.inference_mode()
def logits(directory: Path, weights: ModelWeights) -> torch.Tensor:
    """A prompt's logits by the GPU's operations."""
    config = load_config(directory)
    pool = torch.zeros((24, config.num_layers, 2, config.num_kv_heads, 16, config.head_dim), dtype=HALF)
    ops = CudaOps(config, pool, 384, 4)
    model = DecoderModel(config, weights, ops)
    batch = batch_of([StepRow(sequence(tokens(1, 9), [0]), 9)], 16)
    hidden = model.forward(ops.upload((batch.token_ids,))[0], ops.begin_step(batch))
    return model.logits(hidden).float()


def save_gpt_oss(directory: Path) -> None:
    """Save a GPT-OSS in MXFP4, with 192 columns for each expert."""
    config = transformers.GptOssConfig(
        **{**SIZES, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 1, "num_local_experts": 4}
    )
    save_model(directory, config)
    config_path = directory / "config.json"
    saved = json.loads(config_path.read_text())
    config_path.write_text(json.dumps({**saved, "quantization_config": {"quant_method": "mxfp4"}}))
    generator, held = torch.Generator().manual_seed(6), {}
    for key, tensor in load_file(directory / "model.safetensors").items():
        held[key] = tensor
        if key.endswith(("gate_up_proj", "down_proj")):
            num_experts, num_ins, num_outs = tensor.shape
            blocks = torch.randint(0, 256, (num_experts, num_outs, num_ins // 32, 16), generator=generator)
            scales = torch.randint(120, 126, blocks.shape[:-1], generator=generator)
            held |= {f"{key}_blocks": blocks.to(torch.uint8), f"{key}_scales": scales.to(torch.uint8)}
            del held[key]
    save_file(held, directory / "model.safetensors", metadata={"format": "pt"})
