"""How a quantised checkpoint's activations are rounded to fp8 before a product with an fp8 weight.

This is used only with ``--fp8-activations``. Otherwise activations stay in 16 bits, which is closer to the model before
quantisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.quantisation import load_quantisation, quantisation_config

MIN_GROUP = 32  # inputs that one instruction multiplies; group sizes are multiples of it
_FP8 = ("float", 8)


@dataclass(frozen=True, slots=True)
class Activations:
    """How rows of inputs are rounded to e4m3."""

    group_size: int | None = None  # number of inputs in a row that share a scale; None: all
    is_static: bool = False  # whether all rows share one scale, which the checkpoint has for each matrix


def load_activations(directory: Path) -> Activations:
    """The rounding that the checkpoint in ``directory`` asks for.

    Raises ModelError if it asks for none, or for one that is not supported.
    """
    config = quantisation_config(directory)
    quantisation = load_quantisation(directory)  # raises for unsupported formats
    try:
        match None if quantisation is None else quantisation.method:
            case "compressed-tensors":
                return _of_groups(config)
            case "fp8":
                block_size = None if quantisation is None else quantisation.block_size
                return _of_fp8(config, None if block_size is None else block_size[1])
            case "modelopt":
                return _of_modelopt(config.get("quant_algo"))
            case method:
                what = "not quantised" if method is None else f"quantised by {method}"
                raise _NotRoundedError(f"its weights are {what}")
    except _NotRoundedError as error:
        raise ModelError(
            f"--fp8-activations is on, and {directory} does not say how to round them to fp8: {error}; leave it out"
        ) from error


class _NotRoundedError(Exception):
    """The checkpoint does not round activations, or in a way that is not supported."""


def _of_fp8(config: Mapping[str, Any], block: int | None) -> Activations:
    match config.get("activation_scheme", "dynamic"):
        case "dynamic":
            return Activations(_group_size(block))
        case "static" if block is None:
            return Activations(is_static=True)
        case scheme:
            of_blocks = "" if block is None else f" beside blocks of {block}"
            raise _NotRoundedError(
                f"activation_scheme is {scheme!r}{of_blocks}; dynamic is computed, and static without blocks"
            )


def _of_modelopt(algo: str | None) -> Activations:
    match algo:
        case "FP8":
            return Activations(is_static=True)
        case "FP8_PER_CHANNEL_PER_TOKEN":
            return Activations()
    raise _NotRoundedError(f"quant_algo is {algo!r}; FP8 and FP8_PER_CHANNEL_PER_TOKEN round activations")


def _of_groups(config: Mapping[str, Any]) -> Activations:
    """The rounding of a llm-compressor checkpoint, which must be the same for all its groups of modules."""
    found: dict[Activations, str] = {}
    for name, group in (config.get("config_groups") or {}).items():
        weights = group.get("weights")
        if weights is not None and (weights.get("type"), weights.get("num_bits")) == _FP8:
            found.setdefault(_of_scheme(name, group.get("input_activations")), name)
    if len(found) != 1:
        names = ", ".join(found.values())
        raise _NotRoundedError(
            f"{names} round activations in unlike ways" if found else "none of its config_groups has weights in fp8"
        )
    return next(iter(found))


def _of_scheme(name: str, scheme: Any) -> Activations:
    if not isinstance(scheme, Mapping) or (scheme.get("type"), scheme.get("num_bits")) != _FP8:
        raise _NotRoundedError(f"{name}'s input_activations are not float of 8 bits")
    if not scheme.get("symmetric", True):
        raise _NotRoundedError(f"{name}'s input_activations are not symmetric")
    match scheme.get("strategy"), scheme.get("dynamic"):
        case "token", True:
            return Activations()
        case "group", True:
            return Activations(_group_size(scheme.get("group_size")))
        case "tensor", False | None:
            return Activations(is_static=True)
    raise _NotRoundedError(
        f"{name}'s input_activations have strategy {scheme.get('strategy')!r} with dynamic {scheme.get('dynamic')!r}; dynamic by "
        "token or group is computed, and static by tensor"
    )


def _group_size(size: Any) -> int | None:
    if size is not None and (not isinstance(size, int) or size < 1 or size % MIN_GROUP):
        raise _NotRoundedError(f"inputs share a scale in groups of {size!r}, which is no multiple of {MIN_GROUP}")
    return size
