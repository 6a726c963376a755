"""The scales of an fp8 (e4m3) KV pool: their sources, and their digest.

A pool holds value / scale. So the scale that fits a head is the largest magnitude of its keys, or of its values, divided by 448.
Scales are ``[num_layers, 2, num_kv_heads]`` fp32; index 0 of the second dimension is for keys. A checkpoint may have them as
llm-compressor and ModelOpt write them beside full weights: per layer one number, or one for each KV head. Without them they are 1,
and values beyond 448 are clipped.

Names and their meaning follow vLLM (``maybe_remap_kv_scale_name`` in its ``weight_utils.py``). Not for the scales of queries, which
are never stored.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.model import ModelConfig

logger = logging.getLogger(__name__)

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448; kernels define it, too, but a CPU worker may lack Triton

_SCALE = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:k_proj\.k|v_proj\.v|(?:qkv_proj\.)?[kv]|kv)_scale")
# For engines that also round queries and attention weights. Without rounding, the model is the same and more exact.
_UNUSED = re.compile(r"model\.layers\.\d+\.self_attn\.(?:(?:q_proj\.|qkv_proj\.)?q|prob)_scale")
_KINDS = {"k_scale": (0,), "v_scale": (1,), "kv_scale": (0, 1)}

_WAY_OUT = "take a checkpoint with sound scales, or leave --kv-dtype at auto"


def is_attention_scale(name: str) -> bool:
    """Whether a checkpoint's tensor of this name is a scale of attention, which only an fp8 pool uses."""
    name = name.replace("language_model.", "", 1)  # before or behind "model.", in checkpoints that also read images
    return bool(_SCALE.fullmatch(name) or _UNUSED.fullmatch(name))


def load_kv_scales(files: Sequence[Path], config: ModelConfig) -> torch.Tensor:
    """The scales in the checkpoint ``files``: ``[num_layers, 2, num_kv_heads]`` fp32 on the CPU; 1 if there are none.

    Raises ModelError naming the file, the tensor and its value if one is not positive and finite, has another shape than ``[]`` or
    ``[num_kv_heads]`` (except dimensions of 1), exists twice, or is missing while others exist.
    """
    scales = _scales_in(files, config)
    if scales is not None:
        logger.info("K/V scales: the checkpoint's")
        return scales
    logger.warning(
        "K/V scales are 1: keys and values beyond %g are cut, small ones lose digits (llm-compressor makes scales)",
        FP8_MAX,
    )
    return unit_kv_scales(config)


def unit_kv_scales(config: ModelConfig) -> torch.Tensor:
    """Scales that change nothing."""
    return torch.ones(config.num_layers, 2, config.num_kv_heads)


def kv_scales_digest(scales: torch.Tensor) -> str:
    """16 hex digits of all bits of the scales, for :class:`kvrelay.common.model_card.KvLayout`; "" if all are 1."""
    if bool((scales == 1).all()):
        return ""
    return hashlib.blake2b(scales.cpu().numpy().astype("<f4").tobytes(), digest_size=8).hexdigest()


def _scales_in(files: Sequence[Path], config: ModelConfig) -> torch.Tensor | None:
    scales = unit_kv_scales(config)
    given: dict[tuple[int, int], str] = {}
    for path, name, tensor in _scale_tensors(files):
        layer = int(name.split(".")[2])
        if config.num_layers <= layer < config.num_layers + config.num_draft_layers:
            continue  # the pool of what guesses is not in fp8
        if layer >= config.num_layers:
            raise ModelError(f"{path}: {name} is of layer {layer}; the model has {config.num_layers}: {_WAY_OUT}")
        values = _checked(path, name, tensor, config.num_kv_heads)
        for kind in _KINDS[name.rpartition(".")[2]]:
            if (other := given.get((layer, kind))) is not None:
                raise ModelError(f"{path}: {name} and {other} are scales of the same {'kv'[kind]}: {_WAY_OUT}")
            given[layer, kind], scales[layer, kind] = name, values
    if not given:
        return None
    for layer in range(config.num_layers):
        for kind in range(2):
            if (layer, kind) not in given:
                name = f"model.layers.{layer}.self_attn.{'kv'[kind]}_scale"
                raise ModelError(f"{files[0].parent}: {name} is missing, where others are there: {_WAY_OUT}")
    return scales


def _scale_tensors(files: Sequence[Path]) -> Iterator[tuple[Path, str, torch.Tensor]]:
    for path in files:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    if _SCALE.fullmatch(name):
                        yield path, name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{path} cannot be read ({error}); it is truncated or no safetensors file: fetch or make it again"
            ) from error


def _checked(path: Path, name: str, tensor: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """The tensor's numbers ``[1]`` or ``[num_kv_heads]`` in fp32, the type in which they are used."""
    values = tensor.float().flatten()
    if tensor.numel() != 1 and [size for size in tensor.shape if size != 1] != [num_kv_heads]:
        raise ModelError(
            f"{path}: {name} has shape {list(tensor.shape)}; it must be one number, or {num_kv_heads}, one per KV head: {_WAY_OUT}"
        )
    for head, value in enumerate(values.tolist()):
        if not 0 < value < float("inf"):  # also false for NaN
            place = f"{name}[{head}]" if len(values) > 1 else name
            raise ModelError(f"{path}: {place} is {value:g}; a K/V scale is a positive, finite number: {_WAY_OUT}")
    return values
