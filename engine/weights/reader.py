"""A checkpoint's tensors by the names that a model has for them, whatever they are stored as.

A module's stored weight lies in several tensors (integers, scales, zeros), perhaps in several files. They are read together, when
the weight is asked for, and are one weight here, under the name that it would have in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.quantisation import Quantisation
from kvrelay.engine.weights.formats import (
    StoredWeight,
    awq_weight,
    gptq_weight,
    mxfp4_weight,
    packed_weight,
    scaled_weight,
)
from kvrelay.engine.weights.headers import TensorHeader, unreadable

# The parts of a stored weight, by the last word of their names; a module with one of the first four has such a weight.
_MARKS = ("weight_scale", "weight_scale_inv", "weight_packed", "qweight")
_PARTS = (*_MARKS, "weight", "weight_zero_point", "weight_shape", "weight_g_idx", "qzeros", "scales", "g_idx")
_OF_ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "activation_scale")
_FULL = "BF16"


class CheckpointReader:
    """Reads tensors onto a device. A context: files are open in between, each from its first tensor on."""

    def __init__(
        self, headers: Mapping[str, TensorHeader], quantisation: Quantisation | None, dtype: torch.dtype, device: str
    ) -> None:
        """``headers`` and ``quantisation``: the checkpoint's own. ``dtype``: what stored weights are dequantised to.

        Raises ModelError naming a stored weight whose tensors do not fit together; for that, none of them is read in full.
        """
        self._tensors = headers
        self._quantisation = quantisation
        self._dtype = dtype
        self._device = device
        self._files = ExitStack()
        self._open: dict[Path, Any] = {}
        self._parts: dict[str, dict[str, str]] = {}  # of stored weights: their tensors
        self.num_bytes_read = 0
        self.headers: dict[str, TensorHeader] = dict(headers)
        """Of all tensors by the names that models have, a stored weight as the one that it is in full."""
        self.outlines: dict[str, StoredWeight] = {}
        """Of stored matrices: their form, without their numbers."""
        if quantisation is not None:
            self._index(is_mxfp4=quantisation.method == "mxfp4")

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Closes the files."""
        self._files.close()

    def read(self, name: str) -> torch.Tensor:
        """A tensor. A stored weight is dequantised. Raises ModelError naming a file that cannot be read."""
        if name not in self._parts:
            return self._get(name)
        stored = self._stored(name, self._get)
        return stored.dequantised() if isinstance(stored, StoredWeight) else stored

    def stored(self, name: str) -> StoredWeight:
        """One of the ``outlines`` with its numbers. Raises ModelError naming a file that cannot be read."""
        stored = self._stored(name, self._get)
        assert isinstance(stored, StoredWeight), f"{name} has no outline"
        return stored

    def part(self, name: str, part: tuple[range, ...]) -> torch.Tensor:
        """The elements ``part``, by dimensions, of a tensor; of one in full no others are read. Raises ModelError."""
        header = self.headers[name]
        slices = tuple(slice(some.start, some.stop) for some in part)
        if name in self._parts or all(len(some) == size for some, size in zip(part, header.shape, strict=True)):
            return self.read(name)[slices]
        with _naming_file(header.path):
            tensor: torch.Tensor = self._file(header.path).get_slice(name)[slices]
        self.num_bytes_read += tensor.nbytes
        return tensor

    def is_zero_bias(self, name: str) -> bool:
        """Whether a tensor adds nothing: some GPTQ checkpoints have biases for models without."""
        return name.endswith(".bias") and not bool(self._get(name).any())

    def _stored(self, name: str, get: Callable[[str], torch.Tensor]) -> StoredWeight | torch.Tensor:
        """A stored weight from its parts; in full already if that is its format's only form."""
        assert self._quantisation is not None, f"{name} of a checkpoint without stored weights"
        try:
            parts = {role: get(tensor) for role, tensor in self._parts[name].items()}
            match self._quantisation.method:
                case "awq":
                    return awq_weight(parts, self._dtype)
                case "gptq":
                    return gptq_weight(parts, self._quantisation.zero_offset, self._dtype)
                case "mxfp4":  # [experts, in, out], as full ones lie
                    return mxfp4_weight(parts["blocks"], parts["scales"], self._dtype).transpose(-1, -2)
            if "weight_packed" in parts:
                return packed_weight(parts, self._dtype)
            return scaled_weight(parts, self._quantisation.block_size, self._dtype)
        except (KeyError, ValueError) as error:
            path = self._tensors[next(iter(self._parts[name].values()))].path
            reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
            raise ModelError(f"{path}: {name} cannot be read as it is stored: {reason}") from error

    def _get(self, tensor: str) -> torch.Tensor:
        path = self._tensors[tensor].path
        with _naming_file(path):
            found: torch.Tensor = self._file(path).get_tensor(tensor)
        self.num_bytes_read += found.nbytes
        return found

    def _outline(self, tensor: str) -> torch.Tensor:
        """A matrix without its numbers; vectors have them."""
        header = self._tensors[tensor]
        with _naming_file(header.path):
            part = self._file(header.path).get_slice(tensor)
            if len(header.shape) < 2:
                vector: torch.Tensor = part[...]
                return vector
            return torch.empty(header.shape, dtype=part[:0].dtype, device="meta")

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = self._files.enter_context(safe_open(path, framework="pt", device=self._device))
        return self._open[path]

    def _index(self, is_mxfp4: bool) -> None:
        """Find the stored weights."""
        modules: dict[str, dict[str, str]] = {}
        for tensor in self._tensors:
            module, _, role = tensor.rpartition(".")
            modules.setdefault(module, {})[role] = tensor
        self.headers.clear()
        for tensor, header in self._tensors.items():
            module, _, role = tensor.rpartition(".")
            kind = tensor.rpartition("_")[2]
            if role in _OF_ACTIVATIONS:
                continue
            if role in _PARTS and not modules[module].keys().isdisjoint(_MARKS):
                parts = {part: modules[module][part] for part in _PARTS if part in modules[module]}
                self._parts[f"{module}.weight"] = parts
            elif is_mxfp4 and kind in ("blocks", "scales"):
                self._parts.setdefault(tensor.removesuffix(f"_{kind}"), {})[kind] = tensor
            else:
                self.headers[tensor] = header
        for name, tensors in self._parts.items():
            outline = self._stored(name, self._outline)
            if isinstance(outline, StoredWeight):
                self.outlines[name] = outline
            path = self._tensors[next(iter(tensors.values()))].path
            self.headers[name] = TensorHeader(path, tuple(outline.shape), _FULL)


@contextmanager
def _naming_file(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise unreadable(path, error) from error
