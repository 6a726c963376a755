"""The contents of a checkpoint's files by their headers, read and checked before any memory is taken for weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from kvrelay.common.errors import ModelError

_FULL = ("F64", "F32", "F16", "BF16")
_OF_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*weight)")


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor in a file."""

    path: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' name, such as "BF16"; for a known quantised weight: the type of the full weight


def read_headers(directory: Path) -> dict[str, TensorHeader]:
    """All tensors of the checkpoint in ``directory``, by name.

    Raises ModelError naming the file if one is missing or truncated, if two have the same tensor, or if a tensor is not where the
    index says.
    """
    headers: dict[str, TensorHeader] = {}
    for path in checkpoint_files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    if name in headers:
                        raise ModelError(f"{path}: tensor {name} is in {headers[name].path.name}, too")
                    part = file.get_slice(name)
                    headers[name] = TensorHeader(path, tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError, MemoryError, RuntimeError) as error:
            raise unreadable(path, error) from error
    for name, file_name in _weight_map(directory).items():
        if name not in headers or headers[name].path.name != file_name:
            raise ModelError(
                f"{directory / file_name} lacks tensor {name}, which {_index(directory).name} says is in it"
            )
    return headers


def unreadable(path: Path, error: Exception) -> ModelError:
    """The error for a file that safetensors cannot read, or that it or torch cannot map (MemoryError, RuntimeError)."""
    if isinstance(error, MemoryError | RuntimeError):
        return ModelError(
            f"{path} cannot be mapped ({error}); give this process more address space (ulimit -v, vm.max_map_count, a limit of "
            "memory)"
        )
    return ModelError(f"{path} cannot be read ({error}); it is truncated or no safetensors file: fetch it again")


def check_full(headers: Mapping[str, TensorHeader]) -> None:
    """Raises ModelError if a weight is in a quantised format that the checkpoint's config does not mention.

    Converting its numbers directly would ignore their scales.
    """
    for name, header in headers.items():
        if header.dtype not in _FULL and (name.endswith("weight") or ".experts." in name):
            raise ModelError(
                f"{header.path}: tensor {name} has format {header.dtype}, of a quantised checkpoint, but neither config.json nor "
                "a scale beside it tells what its numbers mean: take the config.json that belongs to it, or a checkpoint in bf16, "
                "fp16 or fp32"
            )


def check_experts(directory: Path, names: Iterable[str]) -> None:
    """Raises ModelError naming a weight that an expert lacks, and others beside it have.

    transformers stacks the experts of a layer, and fails on unequal numbers of them without a name. Call this where it fails: in
    some types an expert has fewer weights than others. ``names``: as models use them.
    """
    found: dict[tuple[str, str], set[int]] = {}
    of_layers: dict[str, set[int]] = {}
    for name in names:
        if (match := _OF_EXPERT.fullmatch(name)) is not None:
            layer, number, weight = match.groups()
            found.setdefault((layer, weight), set()).add(int(number))
            of_layers.setdefault(layer, set()).add(int(number))
    for (layer, weight), numbers in found.items():
        if lacking := of_layers[layer] - numbers:
            raise ModelError(
                f"{directory} lacks {layer}{min(lacking)}{weight}, which other experts have: the checkpoint is not complete; fetch "
                "it again"
            )


def check_layers(directory: Path, num_layers: int, headers: Mapping[str, TensorHeader]) -> None:
    """Raises ModelError if there are more layers than tensors: making them, even without memory, would take forever."""
    if num_layers > len(headers):
        raise ModelError(
            f"{directory / 'config.json'} asks for {num_layers} layers, but the checkpoint has {len(headers)} tensors"
        )


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in order. Raises ModelError if there are none or a shard is missing."""
    if _index(directory).exists():
        names = sorted(set(_weight_map(directory).values()))
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise ModelError(
                f"{directory}: shard {missing[0]} is missing ({len(missing)} of {len(names)}); fetch it again"
            )
        return [directory / name for name in names]
    single = directory / "model.safetensors"
    if not single.is_file():
        raise ModelError(f"{directory} has no model.safetensors (nor an index of shards); only safetensors are loaded")
    return [single]


def _index(directory: Path) -> Path:
    return directory / "model.safetensors.index.json"


def _weight_map(directory: Path) -> dict[str, str]:
    """File names by tensor from the index; empty without an index. Raises ModelError."""
    index = _index(directory)
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {str(name): str(file_name) for name, file_name in weight_map.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} cannot be read: {error}") from error
    outside = [name for name in names.values() if Path(name).name != name]
    if outside:
        raise ModelError(f"{index} names {outside[0]!r}, which lies outside the directory")
    return names
