"""The quantisation of a checkpoint's weights, and which formats we read.

Most of a format shows in the tensors themselves (:mod:`kvrelay.engine.weights.reader`): which modules are quantised, in how many
bits, in which groups. So lists of quantised modules need not be read. This module refuses settings that the tensors do not show, or
that we do not compute. Rounding of activations is read elsewhere (:mod:`kvrelay.engine.config.activations`), and only if it is
wanted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.model import read_config

METHODS = ("awq", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4")
_MODELOPT_ALGOS = (None, "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
_COMPRESSED_FORMATS = (
    "dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision", None,
)  # fmt: skip
_COMPRESSED_TYPES = (("float", 8), ("int", 4), ("int", 8))
_GPTQ_OFFSETS = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True, slots=True)
class Quantisation:
    """What must be known of stored weights beside their tensors."""

    method: str  # one of METHODS
    block_size: tuple[int, int] | None = None  # (outputs, inputs) that share a scale
    zero_offset: int = 0  # number to add to the stored zeros
    bits: int | None = None  # bits of most quantised weights; None: there are none
    expert_bits: int | None = None  # bits of experts, if they have others
    is_shuffled: bool = False  # a group's inputs need not be neighbours: each matrix has an order of its own

    def stored_bits(self, name: str) -> float:
        """Bits of a number of the quantised weight ``name``, with its share of scales and zeros: usually 32 bits per 128 numbers,
        for MXFP4 8 per 32.
        """
        bits = self.expert_bits if self.expert_bits is not None and ".experts." in name else self.bits
        return 0 if bits is None else bits + 8 / 32


def load_quantisation(directory: Path) -> Quantisation | None:
    """Read ``config.json``, or ModelOpt's file beside it. None: weights are stored in full. Raises ModelError."""
    config = quantisation_config(directory)
    return None if config is None else parse_quantisation(config, str(directory))


def quantisation_config(directory: Path) -> Any:
    """The raw quantisation settings in ``config.json`` or ModelOpt's file beside it; None if there are none. Raises ModelError."""
    whole = read_config(directory)
    text = whole.get("text_config")
    of_text = text.get("quantization_config") if isinstance(text, Mapping) else None  # so in Kimi K2.5
    config = whole.get("quantization_config") or of_text
    if isinstance(config, Mapping) and "expert_dtype" in whole:  # so in DeepSeek-V4
        config = {"expert_dtype": whole["expert_dtype"], **config}
    modelopt = directory / "hf_quant_config.json"
    if config is None and modelopt.is_file():
        try:
            config = {"quant_method": "modelopt", **json.loads(modelopt.read_text(encoding="utf-8"))["quantization"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{modelopt} cannot be read: {error!r}") from error
    return config


def parse_quantisation(config: Any, directory: str) -> Quantisation:
    """Parse a ``quantization_config``; ``directory`` appears in errors. Raises ModelError naming what is not supported."""
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if method not in METHODS:
        raise ModelError(
            f"{directory}: quant_method {method!r} is not supported; supported are {', '.join(METHODS)}: take such a checkpoint, "
            "or one in bf16, fp16 or fp32"
        )
    try:
        match method:
            case "awq":
                _require(config, "bits", 4)
                _require(config, "version", "gemm", "GEMM", None)
                _require(config, "format", "gemm", None)
                _require(config, "backend", "autoawq", "auto", "gemm", None)
                return Quantisation(method, bits=4)
            case "compressed-tensors":
                return _compressed(config)
            case "fp8":
                _require(config, "expert_dtype", "fp4", "fp8", None)
                expert_bits = 4 if config.get("expert_dtype") == "fp4" else None
                return Quantisation(
                    method, _block_size(config.get("weight_block_size")), bits=8, expert_bits=expert_bits
                )
            case "gptq":
                _require(config, "bits", 4, 8)
                _require(config, "pack_dtype", "int32", None)
                _require(config, "is_marlin_format", False, None)
                packing = "format" if config.get("checkpoint_format") is None else "checkpoint_format"
                _require(config, packing, *_GPTQ_OFFSETS, None)
                offset = _GPTQ_OFFSETS[config.get(packing) or "gptq"]
                return Quantisation(method, None, offset, config["bits"], is_shuffled=bool(config.get("desc_act")))
            case "modelopt":
                _require(config, "quant_algo", *_MODELOPT_ALGOS)
                _require(config, "kv_cache_quant_algo", "FP8", None)
                block_size = (128, 128) if config.get("quant_algo") == "FP8_PB_WO" else None
                return Quantisation(method, block_size, bits=8 if config.get("quant_algo") else None)
    except _NotReadError as error:
        raise ModelError(f"{directory}: {error}: take another checkpoint, or one in bf16, fp16 or fp32") from error
    return Quantisation(method, bits=4)  # mxfp4


class _NotReadError(Exception):
    """A setting that we do not support."""


def _require(config: Mapping[str, Any], name: str, *allowed: Any, where: str = "") -> None:
    value = config.get(name)
    if value not in allowed:
        known = ", ".join(repr(one) for one in allowed if one is not None)
        raise _NotReadError(
            f"{where}{name} is {value!r} in a checkpoint of {config.get('quant_method', 'compressed-tensors')}; {known} can be read"
        )


def _block_size(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(one, int) and one > 0 for one in value):
        raise _NotReadError(f"a block of weights is {value!r}, not two positive numbers")
    return value[0], value[1]


def _compressed(config: Mapping[str, Any]) -> Quantisation:
    """The quantisation of a llm-compressor checkpoint, which must have one block size for all groups."""
    _require(config, "format", *_COMPRESSED_FORMATS)
    _require(config.get("sparsity_config") or {}, "format", "dense", None, where="sparsity_config's ")
    if config.get("transform_config"):
        raise _NotReadError("transform_config rotates weights or activations, which is not supported")
    if scheme := config.get("kv_cache_scheme"):  # scales for an fp8 pool
        _require(scheme, "type", "float", where="kv_cache_scheme's ")
        _require(scheme, "num_bits", 8, where="kv_cache_scheme's ")
    sizes: set[tuple[int, int] | None] = set()
    bits: int | None = None
    is_shuffled = False
    for name, group in _groups(config):
        _require(group, "format", *_COMPRESSED_FORMATS, where=f"{name}'s ")
        weights = group.get("weights")
        if weights is None:
            continue
        kind = (weights.get("type"), weights.get("num_bits"))
        if kind not in _COMPRESSED_TYPES:
            known = ", ".join(f"{name} of {bits}" for name, bits in _COMPRESSED_TYPES)
            raise _NotReadError(f"{name}'s weights are {kind[0]} of {kind[1]} bits; {known} can be read")
        bits = max(bits or 0, weights["num_bits"])
        is_shuffled |= weights.get("actorder") == "group"
        if weights.get("strategy") == "block":
            sizes.add(_block_size(weights.get("block_structure")))
    if len(sizes) > 1:
        raise _NotReadError(f"config_groups have blocks of {len(sizes)} sizes; one for all can be read")
    block_size = sizes.pop() if sizes else None
    return Quantisation("compressed-tensors", block_size, bits=bits, is_shuffled=is_shuffled)


def _groups(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise _NotReadError(f"config_groups is a {type(groups).__name__}, not an object")
    for name, group in groups.items():
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping | None):
            raise _NotReadError(f"config_groups' {name} is not an object of schemes")
        yield name, group
