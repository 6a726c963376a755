"""Replaces parts of a transformers model by a device's operations: products, norms, MLPs, experts.

Equal names do not imply equal computations. So a norm or an MLP is replaced only if ours gives the same numbers on made-up rows.
The check at load (:mod:`kvrelay.engine.models.hf.check`) compares the whole model with itself before any replacement.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface
from transformers.pytorch_utils import Conv1D

from kvrelay.engine.models.hf.kept import KeptLinear, take_experts
from kvrelay.engine.models.hf.text import towers_of
from kvrelay.engine.models.ops import Experts, Linear, PagedOps
from kvrelay.engine.weights.parameters import ExpertWeights
from kvrelay.engine.weights.rounding import AnyWeight
from kvrelay.engine.weights.stored import StoredWeight

_ROUTER = re.compile("Router|Gate(?!d)")  # in names of classes; GatedDeltaNet is none
_EXPERTS = "kvrelay"
_BOUND = "kvrelay_experts"  # attribute of a module of experts
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 0.02}  # relative
_OTHERS = "grouped_mm"  # transformers' implementation, for experts that are not bound

Adapt = Callable[[Linear, tuple[str, ...]], Linear]
"""(a product, the names of the layers whose outputs it has side by side) -> a product that adapters can change"""


def is_linear(module: nn.Module) -> bool:
    """Whether our products can replace the module."""
    return type(module) in (nn.Linear, Conv1D, KeptLinear)


def linear_shape(module: Any) -> tuple[int, int]:
    """(outputs, inputs) of a module for which ``is_linear`` is true."""
    num_outputs, num_inputs = (
        module.weight.T.shape if type(module) is Conv1D else (module.out_features, module.in_features)
    )
    return num_outputs, num_inputs


def candidates(model: PreTrainedModel) -> dict[str, bool]:
    """Paths of the weights that products of ours can read as they are stored, and whether each is of experts.

    Layers that share a weight (Zamba 2) share a full one.
    """
    outside = {one for parent, name, _ in towers_of(model) for one in getattr(parent, name).modules()}
    outside.add(model.get_output_embeddings())
    found: dict[str, bool] = {}
    for path, module in model.named_modules():
        if module in outside:
            continue
        if _has_our_experts(module):
            found |= {f"{path}.{name}": True for name in _expert_names(module)}
        if not _is_router(module):
            linears = (name for name, one in module.named_children() if type(one) is nn.Linear and one not in outside)
            found |= {f"{path}.{name}.weight".removeprefix("."): False for name in linears}
    places = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
    return {path: one for path, one in found.items() if places[id(model.get_parameter(path))] == 1}


def replace_parts(
    model: PreTrainedModel,
    ops: PagedOps,
    dtype: torch.dtype,
    adapt: Adapt | None = None,
    stay: Collection[nn.Module] = (),
) -> None:
    """Replace parts by the forms that are fastest with ``ops``. Takes over the weights, one by one.

    ``stay``: modules whose weights others read; they are left as they are, and so are the towers of a multimodal model.
    """
    ExpertsInterface.register(_EXPERTS, _run_experts)
    model.set_experts_implementation(_EXPERTS)
    in_towers = (one for parent, name, _ in towers_of(model) for one in getattr(parent, name).modules())
    _replace_in(model, "", ops, dtype, adapt or (lambda linear, names: linear), frozenset((*stay, *in_towers)))


def _replace_in(
    parent: nn.Module, path: str, ops: PagedOps, dtype: torch.dtype, adapt: Adapt, stay: frozenset[nn.Module]
) -> None:
    is_router = _is_router(parent)
    for name, child in list(parent.named_children()):
        ours: nn.Module | None
        if isinstance(child, KeptLinear) and child in stay:
            ours = child.full()
        else:
            ours = None if is_router or child in stay else _ours(child, path + name, ops, dtype, adapt)
        if ours is None:
            _replace_in(child, f"{path}{name}.", ops, dtype, adapt, stay)
        else:
            setattr(parent, name, ours)


def _is_router(module: nn.Module) -> bool:
    """Routers are small, and use their weights directly."""
    return _ROUTER.search(type(module).__name__) is not None


def _has_our_experts(module: nn.Module) -> bool:
    """Whether a module's class describes its experts to transformers, and they have no norm of their own."""
    is_described = all(
        isinstance(getattr(module, name, None), bool) for name in ("has_gate", "has_bias", "is_transposed")
    )
    return is_described and not getattr(module, "has_post_expert_norm", False)  # transformers 5.17 knows no such norm


def _expert_names(module: Any) -> tuple[str, str]:
    """The parameters of a module of experts."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def _ours(module: Any, name: str, ops: PagedOps, dtype: torch.dtype, adapt: Adapt) -> nn.Module | None:
    """The replacement of the module; experts are bound in place."""
    if is_linear(module):
        product = _product(ops, _weight_of(module), module)
        product.adapt(adapt, name)
        return product
    if type(module).__name__.endswith("RMSNorm"):
        return _norm_like(module, ops, dtype)
    if {name for name, _ in module.named_children()} == _MLP and type(module.act_fn).__name__.startswith("SiLU"):
        if getattr(module, "limit", None) is not None:
            return None  # it clips, which the rows of the comparison may not show (DeepSeek-V4)
        mlp = _mlp_like(module, ops, dtype)
        if mlp is not None:
            mlp.adapt(adapt, name)
        return mlp
    if _has_our_experts(module):
        setattr(module, _BOUND, _bound_experts(module, ops))
    return None


class _Product(nn.Module):
    """A product in the place of a linear layer."""

    def __init__(self, linear: Linear, weight: AnyWeight) -> None:
        super().__init__()
        self._linear = linear
        # some models read the weight's dtype
        self.register_buffer("weight", torch.empty(0, dtype=weight.dtype, device=_device(weight)), persistent=False)

    def adapt(self, adapt: Adapt, *names: str) -> None:
        """Let adapters change it. ``names``: its layers."""
        self._linear = adapt(self._linear, names)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` -> ``[..., out]``"""
        rows = hidden.reshape(-1, hidden.shape[-1])
        # Mamba's are transposed, and kernels take only rows whose numbers are side by side.
        flat = self._linear(rows if rows.stride(1) == 1 else rows.contiguous())
        return flat.view(*hidden.shape[:-1], flat.shape[-1])


def _product(ops: PagedOps, weight: AnyWeight, *layers: Any) -> _Product:
    """One product of linear layers, with outputs side by side. ``weight``: of all."""
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    return _Product(ops.make_linear(weight, torch.cat(biases) if biases else None), weight)


def _weight_of(layer: Any) -> AnyWeight:
    """``[out, in]``, contiguous. GPT-2's Conv1D has it transposed."""
    if isinstance(layer, KeptLinear):
        return layer.stored
    weight: torch.Tensor = layer.weight.detach()
    return weight.T.contiguous() if type(layer) is Conv1D else weight


def _joined(weights: list[AnyWeight]) -> AnyWeight | None:
    """The weights in one matrix, below each other; None if they have no common form."""
    full = [one for one in weights if isinstance(one, torch.Tensor)]
    stored = [one for one in weights if isinstance(one, StoredWeight)]
    if not stored:
        return torch.cat(full)
    joined = None if full else StoredWeight.joined(stored, stored[0].values.device)
    if joined is None:
        return None
    start = 0
    for one in stored:
        joined[start : start + one.shape[0]].copy_(one)
        start += one.shape[0]
    return joined


def _device(weight: AnyWeight) -> torch.device:
    return weight.device if isinstance(weight, torch.Tensor) else weight.values.device


class _Mlp(nn.Module):
    """``down(silu(gate) * up)`` in the place of a layer."""

    def __init__(self, ops: PagedOps, mlp: Any, gate_up: AnyWeight) -> None:
        super().__init__()
        self._gate_up = _product(ops, gate_up, mlp.gate_proj, mlp.up_proj)
        self._down = _product(ops, _weight_of(mlp.down_proj), mlp.down_proj)
        self._silu_mul = ops.silu_mul

    def adapt(self, adapt: Adapt, name: str) -> None:
        """Let adapters change it. ``name``: the module that it replaces."""
        self._gate_up.adapt(adapt, f"{name}.gate_proj", f"{name}.up_proj")
        self._down.adapt(adapt, f"{name}.down_proj")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` in the same shape."""
        gate_up = self._gate_up(hidden.reshape(-1, hidden.shape[-1]))
        down: torch.Tensor = self._down(self._silu_mul(gate_up))
        return down.view(hidden.shape)


class _Norm(nn.Module):
    """A norm in the place of a layer."""

    def __init__(self, ops: PagedOps, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self._rms_norm = ops.rms_norm
        self._weight = weight
        self._eps = eps
        self.register_buffer("weight", weight.new_empty(0), persistent=False)  # some models read the weight's dtype

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Norm over the last dimension; keeps the shape."""
        # A residual may be in fp32 (Mamba 2), and kernels take only rows of the weight's type.
        if hidden.dtype != self._weight.dtype:
            return functional.rms_norm(hidden, hidden.shape[-1:], self._weight.to(hidden.dtype), self._eps)
        flat = self._rms_norm(hidden.reshape(-1, hidden.shape[-1]), self._weight, self._eps)
        return flat.view(hidden.shape)


def _norm_like(module: nn.Module, ops: PagedOps, dtype: torch.dtype) -> _Norm | None:
    """Our norm if it has the same results, with the weight as it is or (Gemma) plus 1; else None."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    rows = _rows(len(weight), weight.device, dtype, eps**0.5)  # in the last row, half of the denominator is eps
    expected = module(rows)
    for offset in (0.0, 1.0):
        norm = _Norm(ops, (weight.detach().float() + offset).to(dtype), eps)
        if _is_close(norm(rows), expected):
            return norm
    return None


def _mlp_like(module: Any, ops: PagedOps, dtype: torch.dtype) -> _Mlp | None:
    """Our MLP if it has the same results, else None. Stored weights of several forms stay in layers of their own."""
    gate_up = _joined([_weight_of(module.gate_proj), _weight_of(module.up_proj)])
    if gate_up is None:
        return None
    rows = _rows(module.up_proj.in_features, _device(gate_up), dtype)
    expected = module(rows)
    mlp = _Mlp(ops, module, gate_up)
    return mlp if _is_close(mlp(rows), expected) else None


def _rows(width: int, device: torch.device, dtype: torch.dtype, least: float = 0.1) -> torch.Tensor:
    """``[3, width]`` with large and small numbers."""
    sizes = torch.tensor([[30.0], [1.0], [least]])
    return (torch.randn(3, width, generator=torch.Generator().manual_seed(4)) * sizes).to(device, dtype)


def _is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compares row by row."""
    distance = (found.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    return bool((distance <= _TOLERANCES[found.dtype]).all())


def _bound_experts(module: Any, ops: PagedOps) -> Experts:
    """Our experts for a class that ``use_experts_implementation`` decorates, which describes its weights' layout.

    Takes over the weights.
    """
    names, kept = _expert_names(module), take_experts(module)
    biases = [getattr(module, f"{name}_bias").detach().flatten() if module.has_bias else None for name in names]
    first = kept.get(names[0])
    num_experts = len(getattr(module, names[0])) if first is None else first.num_experts

    def weight(name: str) -> AnyWeight:
        if name in kept:
            return kept[name].stored
        tensor: torch.Tensor = getattr(module, name).detach()
        setattr(module, name, nn.Parameter(tensor.new_empty(0), requires_grad=False))
        return (tensor.transpose(1, 2) if module.is_transposed else tensor).flatten(0, 1)

    weights = ExpertWeights(num_experts, weight(names[0]), biases[0], weight(names[1]), biases[1])
    return ops.make_experts(weights, module._apply_gate if module.has_gate else module.act_fn)


def _run_experts(module: Any, hidden: torch.Tensor, expert_ids: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """transformers' interface of experts. An id after the last expert's stands for no expert."""
    experts: Experts | None = getattr(module, _BOUND, None)
    if experts is None:
        others: torch.Tensor = ExpertsInterface()[_OTHERS](module, hidden, expert_ids, factors)
        return others
    return experts(hidden, expert_ids.clamp(max=module.num_experts), factors.contiguous())
