"""Keeps quantised weights of a transformers model as they are stored, on a GPU that multiplies with them.

At load, a parameter that stays stored gets no full weight (:func:`find_kept`, :func:`put_kept`). Until our products replace the
layer (:mod:`kvrelay.engine.models.hf.parts`), transformers' own code computes with it, for the check at load. It then gets the
full weight, layer by layer: only while it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from kvrelay.engine.models.hf.origins import Origin, Rows, Traced
from kvrelay.engine.weights.reader import CheckpointReader
from kvrelay.engine.weights.stored import StoredWeight
from kvrelay.engine.weights.targets import Kept

PartOf = Callable[[str, Origin], Origin | None]
"""(path of a parameter, its origin) -> the origin of the rank's part; None if that has none"""
_EXPERTS = "kvrelay_kept"  # attribute of a module of experts


class KeptLinear(nn.Module):
    """A linear layer with a stored weight. Whoever reads the weight, and the layer itself, gets it expanded for the moment."""

    bias: nn.Parameter | None

    def __init__(self, stored: StoredWeight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.stored = stored
        self.register_parameter("bias", bias)
        self.out_features, self.in_features = stored.shape

    @property
    def weight(self) -> torch.Tensor:
        """``[out, in]``, in memory of its own."""
        return self.stored.dequantised()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` -> ``[..., out]``"""
        return functional.linear(hidden, self.weight, self.bias)

    def full(self) -> nn.Linear:
        """A linear layer with the full weight."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(self.weight, requires_grad=False)
        linear.register_parameter("bias", self.bias)
        return linear


@dataclass(frozen=True, slots=True)
class KeptMatrices:
    """A stored parameter of a module of experts."""

    stored: StoredWeight  # [num_experts * out, in]
    num_experts: int
    is_transposed: bool  # the module has inputs before outputs

    def full(self) -> nn.Parameter:
        """``[num_experts, out, in]``, or transposed."""
        full = self.stored.dequantised().view(self.num_experts, -1, self.stored.shape[1])
        return nn.Parameter(full.transpose(1, 2) if self.is_transposed else full, requires_grad=False)


class _KeptExperts:
    """The stored parameters of a module of experts, which are full while its own forward pass runs."""

    def __init__(self, module: nn.Module) -> None:
        self.matrices: dict[str, KeptMatrices] = {}
        self._hooks = (
            module.register_forward_pre_hook(self._expand),
            module.register_forward_hook(self._drop, always_call=True),
        )

    def remove(self) -> None:
        """Leave the module alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def _expand(self, module: nn.Module, _: Any) -> None:
        for name, matrices in self.matrices.items():
            setattr(module, name, matrices.full())

    def _drop(self, module: nn.Module, *_: Any) -> None:
        for name, matrices in self.matrices.items():
            setattr(module, name, _placeholder(matrices.stored))


def take_experts(module: nn.Module) -> dict[str, KeptMatrices]:
    """The stored parameters of a module of experts by name, none if all are full. The module cannot compute with them any more."""
    kept: _KeptExperts | None = getattr(module, _EXPERTS, None)
    if kept is None:
        return {}
    kept.remove()
    delattr(module, _EXPERTS)
    return kept.matrices


@dataclass(frozen=True, slots=True)
class KeptParameters:
    """The parameters of a model that stay stored."""

    origins: Mapping[str, Origin]  # by path
    sources: frozenset[str]  # tensors of the checkpoint that nothing else needs
    nbytes: int  # of all, in memory


NO_PARAMETERS = KeptParameters({}, frozenset(), 0)


def find_kept(
    model: nn.Module,
    candidates: Mapping[str, bool],
    reader: CheckpointReader,
    dtype: torch.dtype,
    keeps: Callable[[StoredWeight], bool],
    part_of: PartOf,
) -> KeptParameters:
    """What can stay stored of a model that was loaded from :class:`Traced` tensors.

    ``candidates``: paths of the parameters that our products can read, and whether each is of experts. ``dtype``: the model's.
    ``keeps``: which forms have a product. ``part_of``: what a rank has of each.
    """
    kept = Kept(reader.outlines, keeps)
    traced = {path: one for path, one in model.named_parameters() if isinstance(one, Traced)}
    nbytes: dict[str, int] = {}
    parts: dict[str, Origin] = {}
    for path, is_of_experts in candidates.items():
        parameter = traced.get(path)
        origin = None if parameter is None else parameter.origin
        if parameter is None or origin is None or parameter.dtype != dtype or origin.is_stack != is_of_experts:
            continue
        if origin.is_transposed and not origin.is_stack:
            continue
        part = part_of(path, origin)
        memory = None if part is None else _memory(part, kept, torch.device("meta"))
        if part is not None and memory is not None:
            nbytes[path], parts[path] = _nbytes(memory), part
    # A source of a full parameter is read in full, so no other parameter can do without its full weights.
    while True:
        of_full = _sources(one for path, one in traced.items() if path not in nbytes)
        shared = {path for path in nbytes if not traced[path].sources.isdisjoint(of_full)}
        if not shared:
            break
        nbytes = {path: count for path, count in nbytes.items() if path not in shared}
    origins = {path: parts[path] for path in nbytes}
    return KeptParameters(origins, _sources(traced[path] for path in nbytes), sum(nbytes.values()))


def put_kept(
    model: nn.Module,
    parameters: KeptParameters,
    reader: CheckpointReader,
    device: torch.device,
    progress: Callable[[int], None],
) -> None:
    """Give the model its stored parameters, on ``device``. ``reader``: reads to it. ``progress`` hears the bytes read so far."""
    kept = Kept(reader.outlines, lambda _: True)
    modules = dict(model.named_modules())
    for path, origin in parameters.origins.items():
        memory = _memory(origin, kept, device)
        assert memory is not None, f"{path} stays stored, but its parts do not fit together"
        start = 0
        for rows in origin.rows:
            end = start + len(rows.outs)
            memory[start:end].copy_(_read(reader, rows))
            start = end
        parent, _, name = path.rpartition(".")
        if origin.is_stack:
            _keep_experts(modules[parent], name, KeptMatrices(memory, len(origin.matrices), origin.is_transposed))
        else:
            above, _, own_name = parent.rpartition(".")
            setattr(modules[above], own_name, KeptLinear(memory, modules[parent].bias))
        progress(reader.num_bytes_read)


def _keep_experts(module: nn.Module, name: str, matrices: KeptMatrices) -> None:
    kept: _KeptExperts | None = getattr(module, _EXPERTS, None)
    if kept is None:
        kept = _KeptExperts(module)
        setattr(module, _EXPERTS, kept)
    kept.matrices[name] = matrices
    setattr(module, name, _placeholder(matrices.stored))


def _placeholder(stored: StoredWeight) -> nn.Parameter:
    return nn.Parameter(torch.empty(0, dtype=stored.dtype, device=stored.values.device), requires_grad=False)


def _memory(origin: Origin, kept: Kept, device: torch.device) -> StoredWeight | None:
    """Memory for a parameter; None if it cannot stay stored."""
    parts = [(rows.name, rows.outs, rows.ins) for rows in origin.rows]
    return kept.joined(parts, device, in_order=origin.is_stack)


def _read(reader: CheckpointReader, rows: Rows) -> StoredWeight:
    shape = reader.headers[rows.name].shape
    if len(shape) == 2:
        return reader.stored(rows.name, (rows.outs, rows.ins))
    expert, first = divmod(rows.outs.start, shape[2] if reader.has_inputs_first else shape[1])
    outs = range(first, first + len(rows.outs))
    matrix = (rows.ins, outs) if reader.has_inputs_first else (outs, rows.ins)
    return reader.stored(rows.name, (range(expert, expert + 1), *matrix))


def _nbytes(stored: StoredWeight) -> int:
    return sum(one.nbytes for one in (stored.values, stored.scale, stored.zero, stored.order) if one is not None)


def _sources(tensors: Iterable[Traced]) -> frozenset[str]:
    return frozenset().union(*(one.sources for one in tensors))
