"""A checkpoint's tensors under the names that a model uses, however they are stored.

A module's stored weight consists of several tensors (integers, scales, zeros), perhaps in several files. They are read together
when the weight is asked for. Here they are one weight, under the name of the full weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.activations import Activations
from kvrelay.engine.config.quantisation import Quantisation
from kvrelay.engine.weights.file_parts import FileParts
from kvrelay.engine.weights.formats import (
    awq_weight,
    fp4_weight,
    gptq_weight,
    mxfp4_weight,
    packed_weight,
    scaled_weight,
)
from kvrelay.engine.weights.headers import TensorHeader, unreadable
from kvrelay.engine.weights.stored import RoundedInputs, StoredWeight

# The parts of a stored weight, by the last part of the name. A module with one of the first four has a stored weight.
_MARKS = ("weight_scale", "weight_scale_inv", "weight_packed", "qweight")
_PARTS = (*_MARKS, "weight", "weight_zero_point", "weight_shape", "weight_g_idx", "qzeros", "scales", "g_idx")
_OF_ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "activation_scale")
_INPUT_SCALES = ("input_scale", "activation_scale")
# What names end with where one tensor has all experts, as in Mistral 4, and which part of the stored weight that is.
_OF_STACKS = {"_scale_inv": "weight_scale_inv", "_activation_scale": "activation_scale", "": "weight"}
_GROUPS = ("weight_g_idx", "g_idx")  # groups of inputs
_NUMBERS = ("weight_shape", *_GROUPS)  # these describe the matrix and have no parts
_FULL = "BF16"


class CheckpointReader:
    """Reads tensors, by default for a CPU. A context in which files stay open, each from its first tensor on."""

    def __init__(
        self,
        headers: Mapping[str, TensorHeader],
        quantisation: Quantisation | None,
        dtype: torch.dtype,
        activations: Activations | None = None,
        upload: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """``headers`` and ``quantisation``: of the checkpoint. ``dtype``: of dequantised weights.

        ``activations``: how inputs of e4m3 weights are rounded; None: not at all.
        ``upload``: copies tensors to the device where they are wanted; None: they stay in the mapped file.
        Raises ModelError naming a stored weight whose tensors do not fit together; this reads none of them in full.
        """
        self._tensors = headers
        self._quantisation = quantisation
        self._activations = activations
        self._dtype = dtype
        self._upload = upload
        self._files = ExitStack()
        self._open: dict[Path, Any] = {}
        self._parts: dict[str, dict[str, str]] = {}  # for stored weights: their tensors
        self.num_bytes_read = 0
        self.headers: dict[str, TensorHeader] = dict(headers)
        """All tensors by the names that models use; a stored weight appears as the full one."""
        self.outlines: dict[str, StoredWeight] = {}
        """Stored weights by name, without their numbers; those of a form may be one object. Experts in one tensor are stacked."""
        self.has_inputs_first = quantisation is not None and quantisation.method == "mxfp4"
        """Whether stored experts in one tensor appear as ``[experts, in, out]``, as in gpt-oss; else as ``[experts, out, in]``."""
        if quantisation is not None:
            self._index(is_mxfp4=self.has_inputs_first)

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Closes the files."""
        self._files.close()

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor; a stored weight is dequantised. Raises ModelError naming a file that cannot be read."""
        if name not in self._parts:
            return self._get(name)
        return self.part(name, tuple(map(range, self.headers[name].shape)))

    def stored(self, name: str, part: tuple[range, ...]) -> StoredWeight:
        """The elements ``part``, by dimensions, of a stored weight that has such a part (:meth:`StoredWeight.part`).

        Reads little more from the files. Raises ModelError naming a file that cannot be read.
        """
        found, rows, columns = self._around(name, part)
        exact = found.part(rows, columns)
        assert exact is not None, f"{name} has no part {part} in its own form"
        return exact

    def part(self, name: str, part: tuple[range, ...]) -> torch.Tensor:
        """The elements ``part``, by dimensions, of a full tensor. Reads no others, or few. Raises ModelError."""
        if name in self._parts:
            found, rows, columns = self._around(name, part)
            exact = found.part(rows, columns)
            if exact is not None:
                full = exact.dequantised()
            else:
                full = found.dequantised()[rows.start : rows.stop, columns.start : columns.stop]
            if len(part) == 2:
                return full
            experts = full.view(len(part[0]), -1, full.shape[1])
            return experts.transpose(-1, -2) if self.has_inputs_first else experts
        return self._get(name, tuple(slice(some.start, some.stop) for some in part))

    def is_zero_bias(self, name: str) -> bool:
        """Whether a tensor is all zeros: some GPTQ checkpoints have biases for models without any."""
        return name.endswith(".bias") and not bool(self._get(name).any())

    def _around(self, name: str, part: tuple[range, ...]) -> tuple[StoredWeight, range, range]:
        """What to read for a part of a stored weight, and its rows and columns in that."""
        tensors, outline = self._parts[name], self.outlines[name]
        if len(part) == 3:
            return self._around_experts(name, part)
        assert self._quantisation is not None, f"{name} of a checkpoint without stored weights"
        layout = FileParts(
            shape=(outline.shape[0], outline.shape[1]),
            tensors={role: self._tensors[tensor].shape for role, tensor in tensors.items() if role not in _NUMBERS},
            is_transposed=self._quantisation.method in ("awq", "gptq"),
            block_size=self._quantisation.block_size,
            is_in_order=outline.order is None,
        )
        rows, columns = layout.around(*part)
        parts: dict[str, torch.Tensor] = {}
        for role, tensor in tensors.items():
            if role == "weight_shape":
                parts[role] = torch.tensor((len(rows), len(columns)))
            elif role not in _GROUPS:
                parts[role] = self._get(tensor, layout.slices(role, rows, columns))
            elif outline.order is not None:
                parts[role] = self._get(tensor)
        start, first = part[0].start - rows.start, part[1].start - columns.start
        return self._stored(name, parts), range(start, start + len(part[0])), range(first, first + len(part[1]))

    def _around_experts(self, name: str, part: tuple[range, ...]) -> tuple[StoredWeight, range, range]:
        """The same where one tensor has all experts. ``part``: ``[experts, out, in]``, or inputs first."""
        experts, outs, columns = (slice(one.start, one.stop) for one in part)
        if not self.has_inputs_first:
            cuts = {"weight": (experts, outs, columns), "weight_scale_inv": (experts,)}
            found = self._stored(name, {role: self._get(one, cuts[role]) for role, one in self._parts[name].items()})
            return found, range(found.shape[0]), range(found.shape[1])
        columns, outs = outs, columns
        size = self.outlines[name].group_size
        groups = slice(columns.start // size, -(-columns.stop // size))
        cut = (experts, outs, groups)
        found = self._stored(name, {role: self._get(tensor, cut) for role, tensor in self._parts[name].items()})
        first = columns.start - groups.start * size
        return found, range(found.shape[0]), range(first, first + len(part[1]))

    def _stored(self, name: str, parts: Mapping[str, torch.Tensor]) -> StoredWeight:
        """Makes a stored weight from its parts."""
        assert self._quantisation is not None, f"{name} of a checkpoint without stored weights"
        try:
            match self._quantisation.method:
                case "awq":
                    return awq_weight(parts, self._dtype)
                case "gptq":
                    return gptq_weight(parts, self._quantisation.zero_offset, self._dtype)
                case "fp8" if parts["weight"].dtype == torch.int8:
                    return fp4_weight(parts, self._dtype)
                case "mxfp4":
                    return mxfp4_weight(parts["blocks"], parts["scales"], self._dtype)
            if "weight_packed" in parts:
                return packed_weight(parts, self._dtype)
            return scaled_weight(parts, self._quantisation.block_size, self._dtype)
        except (KeyError, ValueError) as error:
            path = self._tensors[next(iter(self._parts[name].values()))].path
            reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
            raise ModelError(f"{path}: {name} cannot be read as it is stored: {reason}") from error

    def _get(self, tensor: str, part: tuple[slice, ...] | None = None) -> torch.Tensor:
        header = self._tensors[tensor]
        with _naming_file(header.path):
            file = self._file(header.path)
            is_whole = part is None or all(
                one.indices(size) == (0, size, 1) for one, size in zip(part, header.shape, strict=False)
            )
            found: torch.Tensor = file.get_tensor(tensor) if is_whole else file.get_slice(tensor)[part]
            self.num_bytes_read += found.nbytes
            return found if self._upload is None else self._upload(found)

    def _outline(self, tensor: str) -> torch.Tensor:
        """A matrix without its numbers; vectors keep theirs."""
        header = self._tensors[tensor]
        with _naming_file(header.path):
            part = self._file(header.path).get_slice(tensor)
            if len(header.shape) < 2:
                vector: torch.Tensor = part[...]
                return vector
            return torch.empty(header.shape, dtype=part[:0].dtype, device="meta")

    def _inputs(self, activations: Activations, roles: Mapping[str, str]) -> RoundedInputs:
        """How to round the inputs of the module with the tensors ``roles``."""
        if not activations.is_static:
            return RoundedInputs(activations.group_size, None)
        tensor = next((roles[role] for role in _INPUT_SCALES if role in roles), None)
        found = [] if tensor is None else self._get(tensor).float().flatten().tolist()
        if len(found) != 1 or not 0 < found[0] < math.inf:
            weight = roles["weight"]
            raise ModelError(
                f"{self._tensors[weight].path}: {weight} needs an input_scale, one number above 0, and has {found or 'none'}: "
                "leave --fp8-activations out"
            )
        return RoundedInputs(None, found[0])

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = self._files.enter_context(safe_open(path, framework="pt"))
            except (MemoryError, RuntimeError) as error:
                raise unreadable(path, error) from error
        return self._open[path]

    def _role(self, tensor: str) -> tuple[str, str]:
        """A tensor's module, and which part of it the tensor is."""
        module, _, role = tensor.rpartition(".")
        if role == "scale" and f"{module}.weight" in self._tensors:  # so in DeepSeek-V4
            role = "weight_scale_inv"
        if role in _PARTS or role in _OF_ACTIVATIONS:
            return module, role
        for end, part in _OF_STACKS.items():
            stack = tensor.removesuffix(end)
            if tensor.endswith(end) and stack in self._tensors and f"{stack}_scale_inv" in self._tensors:
                return stack, part
        return module, role

    def _index(self, is_mxfp4: bool) -> None:
        """Find the stored weights."""
        modules: dict[str, dict[str, str]] = {}
        for tensor in self._tensors:
            module, role = self._role(tensor)
            modules.setdefault(module, {})[role] = tensor
        self.headers.clear()
        for tensor, header in self._tensors.items():
            module, role = self._role(tensor)
            kind = tensor.rpartition("_")[2]
            if role in _OF_ACTIVATIONS:
                continue
            if role in _PARTS and not modules[module].keys().isdisjoint(_MARKS):
                parts = {part: modules[module][part] for part in _PARTS if part in modules[module]}
                self._parts[module if module in self._tensors else f"{module}.weight"] = parts
            elif is_mxfp4 and kind in ("blocks", "scales"):
                self._parts.setdefault(tensor.removesuffix(f"_{kind}"), {})[kind] = tensor
            else:
                self.headers[tensor] = header
        forms: dict[tuple[Any, ...], StoredWeight] = {}  # a large mixture has ten thousands of matrices in a few forms
        for name, tensors in self._parts.items():
            numbers = {role: self._outline(tensors[role]) for role in _NUMBERS if role in tensors}
            headers = tuple((role, self._tensors[tensor]) for role, tensor in tensors.items())
            form = (
                tuple((role, header.shape, header.dtype) for role, header in headers),
                tuple(one.numpy().tobytes() for one in numbers.values()),
            )
            outline = forms.get(form)
            if outline is None:
                others = {role: self._outline(tensor) for role, tensor in tensors.items() if role not in numbers}
                outline = self._stored(name, {**others, **numbers})
                if outline.order is None:  # an order is memory of its own matrix
                    forms[form] = outline
            if self._activations is not None and outline.values.dtype == torch.float8_e4m3fn and outline.zero is None:
                outline = replace(
                    outline, inputs=self._inputs(self._activations, modules[name.removesuffix(".weight")])
                )
            self.outlines[name] = outline
            path, shape = self._tensors[next(iter(tensors.values()))].path, tuple(outline.shape)
            if is_mxfp4:  # [experts, in, out], like full ones
                num_experts = self._tensors[tensors["blocks"]].shape[0]
                shape = (num_experts, shape[1], shape[0] // num_experts)
            elif name in self._tensors and len(self._tensors[name].shape) == 3:  # experts in one tensor
                shape = self._tensors[name].shape
            self.headers[name] = TensorHeader(path, shape, _FULL)


@contextmanager
def _naming_file(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise unreadable(path, error) from error
