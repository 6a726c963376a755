"""Cuts a transformers model among ranks, by the plan that transformers has for its type (``base_model_tp_plan``).

The plan names layers whose outputs are cut (``colwise``), and layers whose inputs are cut (``rowwise``), after which ranks sum.
Embeddings, norms and the head stay whole. Nothing in the plan is trusted: unknown entries are refused, attention must get its part
of the heads, and the check at load compares the ranks' logits with the whole model's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.cut import Cut
from kvrelay.engine.models.hf.gate import Layers, probe_layers
from kvrelay.engine.models.hf.loading import load_full_config
from kvrelay.engine.models.hf.model import TransformersModel, pool_sizes, shape_of
from kvrelay.engine.models.hf.outline import NoWeights, model_without_weights
from kvrelay.engine.models.hf.text import text_decoder
from kvrelay.engine.models.ranks import Collectives

_BY_OUTPUTS, _BY_INPUTS = "colwise", "rowwise"
_WHOLE = {"replicated_with_grad_allreduce"}  # only matters for training
# Types of decoders without a plan, and the types with one that have the same layers.
_SAME_LAYERS = {"qwen3_vl_text": "qwen3"}


@dataclass(frozen=True, slots=True)
class LinearCut:
    """A rank's part of a linear layer: some of its outputs, or some of its inputs.

    In the second case the ranks' results must be summed.
    """

    by_outputs: bool
    part: range


@dataclass(frozen=True, slots=True)
class ParameterCut:
    """A rank's part of a parameter: a range of it along ``dim``."""

    dim: int
    part: range

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """A view of the rank's part."""
        return whole.narrow(self.dim, self.part.start, len(self.part))


@dataclass(frozen=True, slots=True)
class Cuts:
    """What a rank keeps of a model. What is not named stays whole."""

    linears: dict[str, LinearCut]  # by path of the layer
    parameters: dict[str, ParameterCut]  # by path of the parameter
    dropped: frozenset[str]  # paths of biases that another rank adds

    def of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """A view of the rank's part of the parameter ``name``; of a dropped one nothing is left."""
        if name in self.dropped:
            return whole[:0]
        cut = self.parameters.get(name)
        return whole if cut is None else cut.of(whole)


def require_plan(directory: Path, num_ranks: int) -> None:
    """Raise what :func:`cut_model` would for the model in ``directory``. Does not read its weights."""
    dtype = torch.float32
    model = model_without_weights(load_full_config(directory), dtype)
    with NoWeights():
        layers = probe_layers(model)
        cut_model(TransformersModel(model, layers, shape_of(model, layers, dtype)), Cut(0, num_ranks))


def cut_model(whole: TransformersModel, cut: Cut) -> tuple[TransformersModel, Cuts]:
    """The rank's part, and what was cut. Takes over ``whole``.

    Raises ModelError like :func:`find_cuts`, or if the part does not run.
    """
    cuts = find_cuts(whole, cut)
    for name, parameter in list(whole.model.named_parameters()):
        module, _, own_name = name.rpartition(".")
        part = nn.Parameter(cuts.of(name, parameter.detach()).clone(), requires_grad=False)
        setattr(whole.model.get_submodule(module), own_name, part)
    return settle(whole, cuts, cut), cuts


def find_cuts(whole: TransformersModel, cut: Cut) -> Cuts:
    """What a rank keeps of the model. Reads no weights: they may be on "meta".

    Raises ModelError if the type has no plan, or one that is not supported, or if its heads cannot be divided among the ranks.
    """
    model, asked = whole.model, f"--tensor-parallel is {cut.num_ranks}"
    name = type(model).__name__
    plan = _plan_of(model.config.get_text_config())
    if not plan:
        raise ModelError(f"{asked}, but transformers has no plan to cut {name}: take 1")
    if whole.shape.states:
        raise ModelError(f"{asked}, but {name} has recurrent layers, whose states are not cut among ranks: take 1")
    _require_heads(whole, cut.num_ranks)
    layers, (decoder, _) = dict(model.named_modules()), text_decoder(model)
    linears: dict[str, LinearCut] = {}
    # Experts are parameters of their module, not layers.
    for layer_name in dict.fromkeys([*layers, *(name for name, _ in model.named_parameters())]):
        kind = _kind_of(plan, layer_name.removeprefix(f"{decoder}."))
        if kind is None or kind in _WHOLE:
            continue
        layer = layers.get(layer_name)
        if kind not in (_BY_OUTPUTS, _BY_INPUTS) or type(layer) is not nn.Linear:
            raise ModelError(f"{asked}, but {layer_name} of {name} is cut by {kind}, which is not served yet: take 1")
        linears[layer_name] = _linear_cut(layer, cut, by_outputs=kind == _BY_OUTPUTS)
    parameters = {f"{name}.weight": ParameterCut(int(not one.by_outputs), one.part) for name, one in linears.items()}
    biases = {f"{name}.bias": one for name, one in linears.items() if layers[name].bias is not None}
    parameters |= {name: ParameterCut(0, one.part) for name, one in biases.items() if one.by_outputs}
    others = (name for name, one in biases.items() if not one.by_outputs)
    return Cuts(linears, parameters, frozenset(others if cut.rank else ()))


def settle(whole: TransformersModel, cuts: Cuts, cut: Cut) -> TransformersModel:
    """The model of a rank whose parameters are cut already. Takes over ``whole``. Raises ModelError if it does not run."""
    model, asked = whole.model, f"--tensor-parallel is {cut.num_ranks}"
    name = type(model).__name__
    for layer_name, one in cuts.linears.items():
        layer: Any = model.get_submodule(layer_name)
        setattr(layer, "out_features" if one.by_outputs else "in_features", len(one.part))
        if f"{layer_name}.bias" in cuts.dropped:
            layer.bias = None
    try:
        probed = probe_layers(model).attention
    except ModelError as error:
        raise ModelError(f"{asked}, but a part of {name} does not run alone: {error}") from error
    # ``whole`` may have switched the layers' own scaling of queries off, so this probe does not see it.
    attention = [replace(one, temperature=before.temperature) for one, before in zip(probed, whole.layers, strict=True)]
    if any(layer.num_q_heads * cut.num_ranks != whole.shape.num_q_heads for layer in attention):
        raise ModelError(f"{asked}, but the plan of transformers leaves the attention of {name} whole: take 1")
    shape = replace(
        whole.shape,
        num_q_heads=attention[0].num_q_heads,
        num_kv_heads=max(layer.num_kv_heads for layer in attention),
        layer_sizes=pool_sizes(attention),
    )
    part = TransformersModel(model, Layers(attention, []), shape)
    part.use_our_attention()
    return part


def sum_outputs(model: PreTrainedModel, cuts: Cuts, collectives: Collectives) -> None:
    """Make layers that are cut by inputs sum over ranks. A layer that is part of a larger replaced part is the last one there."""

    def add_up(_layer: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return collectives.sum(output)

    modules = dict(model.named_modules())
    for name in (name for name, cut in cuts.linears.items() if not cut.by_outputs):
        layer = modules.get(name) or modules[name.rpartition(".")[0]]
        layer.register_forward_hook(add_up)


def _plan_of(config: PreTrainedConfig) -> dict[str, str] | None:
    """transformers' plan for a type of decoders."""
    plan: dict[str, str] | None = config.base_model_tp_plan
    if plan is None and config.model_type in _SAME_LAYERS:
        plan = CONFIG_MAPPING[_SAME_LAYERS[config.model_type]].base_model_tp_plan
    return plan


def _kind_of(plan: dict[str, str], layer_name: str) -> str | None:
    for pattern, kind in plan.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), layer_name):
            return kind
    return None


def _linear_cut(layer: Any, cut: Cut, *, by_outputs: bool) -> LinearCut:
    """The rank's part of a linear layer's outputs, or inputs."""
    size = layer.out_features if by_outputs else layer.in_features
    first, end = (rank * size // cut.num_ranks for rank in (cut.rank, cut.rank + 1))
    return LinearCut(by_outputs, range(first, end))


def _require_heads(whole: TransformersModel, num_ranks: int) -> None:
    heads = {whole.shape.num_q_heads, *(layer.num_kv_heads for layer in whole.layers)}
    if any(count % num_ranks for count in heads):
        fitting = [count for count in range(1, min(heads) + 1) if not any(one % count for one in heads)]
        counts, ranks = (", ".join(map(str, numbers)) for numbers in (sorted(heads), fitting))
        raise ModelError(
            f"--tensor-parallel is {num_ranks}; {whole.shape.architecture} has {counts} heads in its layers, which fit {ranks} "
            "ranks: take one of these"
        )
