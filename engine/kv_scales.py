"""The scales of an fp8 (e4m3) KV pool: where they come from, and what tells one set from another.

A pool holds value / scale, so the scale that fits a head is the largest magnitude of its keys, or of its values, over 448. They
are ``[num_layers, 2, num_kv_heads]`` fp32, index 0 of the second dimension for keys, and come from, in this order:

1. the checkpoint, as llm-compressor and ModelOpt write them beside full weights: a number, or one for each KV head, per layer;
2. ``kv_scales.safetensors`` in the model's directory, by the same names (``kvrelay calibrate-kv`` makes it);
3. nowhere: they are 1, and what is beyond 448 is cut.

Names and their meaning are those that vLLM reads (``maybe_remap_kv_scale_name`` in its ``weight_utils.py``). Not for the scales
of queries, which are never stored.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from kvrelay.common.errors import ModelError
from kvrelay.engine.model_config import ModelConfig

logger = logging.getLogger(__name__)

FILE_NAME = "kv_scales.safetensors"
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448; kernels have it, too, but a CPU worker may lack Triton

_SCALE = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:k_proj\.k|v_proj\.v|(?:qkv_proj\.)?[kv]|kv)_scale")
# Of engines that round queries and attention's weights as well. Without, a model is the same, only more exact.
_UNUSED = re.compile(r"model\.layers\.\d+\.self_attn\.(?:(?:q_proj\.|qkv_proj\.)?q|prob)_scale")
_KINDS = {"k_scale": (0,), "v_scale": (1,), "kv_scale": (0, 1)}

_SOUND_CHECKPOINT = "take a checkpoint with sound scales, or leave --kv-dtype at auto"
_SOUND_FILE = "make the file anew (kvrelay calibrate-kv), or remove it"


def is_attention_scale(name: str) -> bool:
    """Whether a checkpoint's tensor of this name is a scale of attention's: no weight, and of use for fp8 pools only."""
    return bool(_SCALE.fullmatch(name) or _UNUSED.fullmatch(name))


def load_kv_scales(directory: Path, files: Sequence[Path], config: ModelConfig) -> torch.Tensor:
    """The scales of the model in ``directory``, whose checkpoint is ``files``: ``[num_layers, 2, num_kv_heads]`` fp32, on the CPU.

    Raises ModelError naming the file, the tensor and its value if one is no positive, finite number, has another shape than ``[]``
    or ``[num_kv_heads]`` (dimensions of 1 aside), is there twice, or is missing where others are there.
    """
    made = directory / FILE_NAME
    scales = checkpoint_kv_scales(files, config)
    if scales is not None:
        logger.info("K/V scales: the checkpoint's%s", f"; {made} is not used" if made.exists() else "")
        return scales
    if made.exists():
        scales = _scales_in([made], config, _SOUND_FILE)
        if scales is None:
            raise ModelError(f"{made} has no K/V scales: {_SOUND_FILE}")
        logger.info("K/V scales: from %s", made)
        return scales
    logger.warning(
        "K/V scales are 1: keys and values beyond %g are cut, small ones lose digits (kvrelay calibrate-kv)", FP8_MAX
    )
    return unit_kv_scales(config)


def checkpoint_kv_scales(files: Sequence[Path], config: ModelConfig) -> torch.Tensor | None:
    """The scales that a checkpoint brings, None if it has none. Raises ModelError as :func:`load_kv_scales` does."""
    return _scales_in(files, config, _SOUND_CHECKPOINT)


def unit_kv_scales(config: ModelConfig) -> torch.Tensor:
    """Scales that change nothing."""
    return torch.ones(config.num_layers, 2, config.num_kv_heads)


def kv_scales_digest(scales: torch.Tensor) -> str:
    """16 hex digits of all bits of the scales, for :class:`kvrelay.common.model_card.KvLayout`; "" if all are 1."""
    if bool((scales == 1).all()):
        return ""
    return hashlib.blake2b(scales.cpu().numpy().astype("<f4").tobytes(), digest_size=8).hexdigest()


def save_kv_scales(path: Path, scales: torch.Tensor) -> None:
    """Write ``scales`` as :func:`load_kv_scales` reads them; whoever reads meanwhile finds the old file or the new one.

    Raises OSError.
    """
    tensors = {
        f"model.layers.{layer}.self_attn.{kind}_scale": of_kind.contiguous().clone()
        for layer, of_layer in enumerate(scales.cpu())
        for kind, of_kind in zip("kv", of_layer, strict=True)
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(save(tensors, metadata={"format": "pt"}))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _scales_in(files: Sequence[Path], config: ModelConfig, way_out: str) -> torch.Tensor | None:
    scales = unit_kv_scales(config)
    given: dict[tuple[int, int], str] = {}
    for path, name, tensor in _scale_tensors(files):
        layer = int(name.split(".")[2])
        if layer >= config.num_layers:
            raise ModelError(f"{path}: {name} is of layer {layer}; the model has {config.num_layers}: {way_out}")
        values = _checked(path, name, tensor, config.num_kv_heads, way_out)
        for kind in _KINDS[name.rpartition(".")[2]]:
            if (other := given.get((layer, kind))) is not None:
                raise ModelError(f"{path}: {name} and {other} are scales of the same {'kv'[kind]}: {way_out}")
            given[layer, kind], scales[layer, kind] = name, values
    if not given:
        return None
    for layer in range(config.num_layers):
        for kind in range(2):
            if (layer, kind) not in given:
                name = f"model.layers.{layer}.self_attn.{'kv'[kind]}_scale"
                raise ModelError(f"{files[0].parent}: {name} is missing, where others are there: {way_out}")
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


def _checked(path: Path, name: str, tensor: torch.Tensor, num_kv_heads: int, way_out: str) -> torch.Tensor:
    """The tensor's numbers ``[1]`` or ``[num_kv_heads]`` in fp32, the type in which they are used."""
    values = tensor.float().flatten()
    if tensor.numel() != 1 and [size for size in tensor.shape if size != 1] != [num_kv_heads]:
        raise ModelError(
            f"{path}: {name} has shape {list(tensor.shape)}; it must be one number, or {num_kv_heads}, one per KV head: {way_out}"
        )
    for head, value in enumerate(values.tolist()):
        if not 0 < value < float("inf"):  # nor NaN
            place = f"{name}[{head}]" if len(values) > 1 else name
            raise ModelError(f"{path}: {place} is {value:g}; a K/V scale is a positive, finite number: {way_out}")
    return values
