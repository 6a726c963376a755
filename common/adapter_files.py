"""An adapter (LoRA) as PEFT saves it: what its two files say, read and checked without torch.

A directory holds ``adapter_config.json`` and ``adapter_model.safetensors``. Of a product ``W x`` of the base model it makes
``W x + scaling * B (A x)`` (Hu et al., 2021). Whatever would be computed in another way is refused by name, never left out.
Whether the shapes fit a base model is for whoever has loaded one.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvrelay.common.errors import KvrelayError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANK = 256
MAX_ADAPTER_NAME = 128  # characters

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{MAX_ADAPTER_NAME - 1}}}")
_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_DTYPES = {"F32": 4, "F16": 2, "BF16": 2}  # and their bytes
_MAX_CONFIG_NBYTES = 2**20
_MAX_HEADER_NBYTES = 2**24
_HASHED_AT_ONCE = 2**20

# Settings of PEFT's LoraConfig that change nothing of what is computed from the tensors.
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
        "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
        "lora_ga_config", "megatron_config", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config",
        "target_modules", "task_type",
    }
)  # fmt: skip
_READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias"})
_INITS = (None, True, False, "gaussian", "orthogonal", "eva")  # others change the base's weights, too


class AdapterError(KvrelayError):
    """An adapter cannot be served. The text names the file, what of it is wrong, and the way out."""


class AdapterAbsentError(AdapterError):
    """An adapter is not there, or not the one that was meant: perhaps it is about to be."""


class AdapterRef(msgspec.Struct, frozen=True):
    """An adapter as components speak of it: what clients call it, and what it is."""

    name: str
    digest: str  # of its files' contents: equal exactly for equal adapters


@dataclass(frozen=True, slots=True)
class LowRankHeader:
    """What an adapter adds to one linear layer of its base."""

    module: str  # the layer's name in the base's checkpoint, such as model.layers.0.self_attn.q_proj
    rank: int
    num_inputs: int
    num_outputs: int
    scaling: float

    def key(self, side: str) -> str:
        """The name of its tensor "A" ``[rank, num_inputs]`` or "B" ``[num_outputs, rank]``."""
        return f"base_model.model.{self.module}.lora_{side}.weight"


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter's directory, checked."""

    directory: Path
    layers: tuple[LowRankHeader, ...]

    @property
    def weights_path(self) -> Path:
        """The file of its tensors."""
        return self.directory / WEIGHTS_FILE

    @property
    def num_parameters(self) -> int:
        """Numbers in its tensors."""
        return sum(one.rank * (one.num_inputs + one.num_outputs) for one in self.layers)

    @classmethod
    def read(cls, directory: Path) -> AdapterFiles:
        """Read what the files say. Raises AdapterError naming the file and what is wrong with it."""
        config = _read_config(directory / CONFIG_FILE)
        shapes = _shapes(directory / WEIGHTS_FILE)
        return cls(directory, _layers(directory, config, shapes))


def check_adapter_name(name: str) -> None:
    """Raises AdapterError unless an adapter may have this name, which is also its folder's."""
    if not _NAME.fullmatch(name):
        raise AdapterError(
            f"{name[:200]!r} is no name of an adapter: it must be 1 to {MAX_ADAPTER_NAME} letters, digits, '-', '_' and '.', "
            "and begin with a letter or a digit"
        )


def adapter_directory(root: Path, name: str) -> Path:
    """Where the adapter ``name`` lies below ``root``. Raises AdapterError if it is no name, or leads elsewhere."""
    check_adapter_name(name)
    directory = root / name
    for path in (directory, directory / CONFIG_FILE, directory / WEIGHTS_FILE):
        if not path.exists():
            raise AdapterAbsentError(
                f"{path} is missing: an adapter is a directory with {CONFIG_FILE} and {WEIGHTS_FILE}"
            )
        if not path.resolve().is_relative_to(root.resolve()):
            raise AdapterError(f"{path} leads outside of {root}: copy the file instead of linking to it")
    return directory


def adapter_digest(directory: Path) -> str:
    """Hex digest of both files' contents. Reads all of them. Raises AdapterError, AdapterAbsentError if one is missing."""
    digest = hashlib.blake2b(digest_size=16, person=b"kvrelay-adapter")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        path = directory / name
        try:
            digest.update(path.stat().st_size.to_bytes(8, "little"))
            with path.open("rb") as file:
                while piece := file.read(_HASHED_AT_ONCE):
                    digest.update(piece)
        except FileNotFoundError as error:
            raise AdapterAbsentError(f"{path} is missing") from error
        except OSError as error:
            raise AdapterError(f"{path} cannot be read: {error}") from error
    return digest.hexdigest()


def require_digest(directory: Path, digest: str) -> None:
    """Raise AdapterAbsentError if other files lie there, such as half copied ones, which say nothing of the adapter that is meant.

    So whoever has found a mistake in files asks this first. Raises as ``adapter_digest``.
    """
    if (found := adapter_digest(directory)) != digest:
        raise AdapterAbsentError(
            f"{directory} has digest {found}, not {digest}: its files were changed, or are not all there yet"
        )


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _MAX_CONFIG_NBYTES:
            raise AdapterError(
                f"{path} has {path.stat().st_size} bytes; a configuration has {_MAX_CONFIG_NBYTES} at most"
            )
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{path} is not a JSON object")
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{path}: 'peft_type' is {config.get('peft_type')!r}; only 'LORA' is served")
    if config.get("use_dora"):
        raise AdapterError(f"{path}: 'use_dora' is set, and DoRA is not served; merge the adapter into its base")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"{path}: 'bias' is {config['bias']!r}; only adapters without biases ('none') are served")
    if (init := config.get("init_lora_weights")) not in _INITS:
        raise AdapterError(
            f"{path}: 'init_lora_weights' is {init!r}, which changes the base's weights; save the adapter converted "
            "(path_initial_model_for_weight_conversion)"
        )
    for name, value in config.items():
        # A setting that nobody knows, or knows to serve, may only say that it is not used.
        if (
            name not in _READ | _WITHOUT_EFFECT
            and name != "init_lora_weights"
            and value not in (None, False, [], {}, "")
        ):
            raise AdapterError(f"{path}: {name!r} is set, which is not served; merge the adapter into its base")
    return config


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a safetensors file's tensors, by name; all of them are there, in a format that is read."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_nbytes = int.from_bytes(file.read(8), "little")
            if not 2 <= header_nbytes <= min(size - 8, _MAX_HEADER_NBYTES):
                raise AdapterError(f"{path} is truncated, or no safetensors file: fetch it again")
            header = json.loads(file.read(header_nbytes))
        header.pop("__metadata__", None)
        shapes: dict[str, tuple[int, ...]] = {}
        end = 0
        for name, about in header.items():
            dtype, shape, (start, stop) = about["dtype"], tuple(map(int, about["shape"])), about["data_offsets"]
            if dtype not in _DTYPES:
                raise AdapterError(f"{path}: tensor {name} has format {dtype}; {', '.join(_DTYPES)} are read")
            if min(shape, default=1) < 0 or stop - start != math.prod(shape) * _DTYPES[dtype]:
                raise AdapterError(
                    f"{path}: tensor {name} has {stop - start} bytes, which do not make {shape} of {dtype}"
                )
            shapes[name], end = shape, max(end, stop)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise AdapterError(f"{path} cannot be read ({error}): it is truncated or no safetensors file") from error
    if size != 8 + header_nbytes + end:
        raise AdapterError(
            f"{path} has {size} bytes, and its header tells of {8 + header_nbytes + end}: fetch it again"
        )
    return shapes


def _layers(
    directory: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[LowRankHeader, ...]:
    sides: dict[str, dict[str, tuple[int, ...]]] = {}
    path = directory / WEIGHTS_FILE
    for name, shape in shapes.items():
        found = _KEY.fullmatch(name)
        if found is None:
            raise AdapterError(
                f"{path}: tensor {name} is neither lora_A nor lora_B of a linear layer, and is not served"
            )
        if len(shape) != 2:
            raise AdapterError(f"{path}: tensor {name} has shape {shape}; linear layers' have two dimensions")
        sides.setdefault(found["module"], {})[found["side"]] = shape
    if not sides:
        raise AdapterError(f"{path} has no tensors")
    layers: list[LowRankHeader] = []
    for module, shape_of in sorted(sides.items()):
        for side in "AB":
            if side not in shape_of:
                raise AdapterError(f"{path}: {module} has no lora_{side}; fetch it again")
        (rank, num_inputs), (num_outputs, rank_of_b) = shape_of["A"], shape_of["B"]
        expected, alpha = (
            _setting(directory, config, "rank_pattern", "r", module),
            _setting(directory, config, "alpha_pattern", "lora_alpha", module),
        )
        if rank != rank_of_b or rank != expected:
            raise AdapterError(
                f"{path}: {module} has rank {rank} in lora_A and {rank_of_b} in lora_B; {CONFIG_FILE} says {expected:g}"
            )
        if not 1 <= rank <= MAX_RANK:
            raise AdapterError(f"{path}: {module} has rank {rank}; ranks of 1 to {MAX_RANK} are served")
        scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        layers.append(LowRankHeader(module, rank, num_inputs, num_outputs, scaling))
    return tuple(layers)


def _setting(directory: Path, config: Mapping[str, Any], pattern: str, default: str, module: str) -> float:
    """What the configuration says for a module: the first of its patterns that matches the module's name's end, or the default."""
    patterns = config.get(pattern) or {}
    path = directory / CONFIG_FILE
    try:
        key = next((one for one in patterns if re.fullmatch(rf"(.*\.)?({one})", module)), None)
        value = config.get(default) if key is None else patterns[key]
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except (re.error, TypeError, OverflowError, RecursionError) as error:
        raise AdapterError(f"{path}: {pattern!r} cannot be read: {error}") from error
    if not math.isfinite(number):
        raise AdapterError(f"{path}: {default!r} is {value!r} for {module}; it must be a number")
    return number
