"""Cuts a transformers model among ranks (:mod:`kvrelay.engine.models.hf.ranks.cuts`), and makes a model of a rank's part.

No plan is trusted: the part must run, attention must get its part of the heads, and the check at load compares the ranks' logits
with those of the whole model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.cut import Cut
from kvrelay.engine.config.model import StateTensor, WholeLayers
from kvrelay.engine.models.hf.gate import Layers, probe_layers
from kvrelay.engine.models.hf.loading import load_full_config
from kvrelay.engine.models.hf.model import TransformersModel, pool_sizes, shape_of
from kvrelay.engine.models.hf.outline import NoWeights, model_without_weights
from kvrelay.engine.models.hf.ranks.cuts import Cuts, find_cuts
from kvrelay.engine.models.ranks import Collectives

_GROUPS = "num_key_value_groups"  # attribute of an attention module: query heads for each K/V head


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


def settle(whole: TransformersModel, cuts: Cuts, cut: Cut) -> TransformersModel:
    """The model of a rank whose parameters are cut already. Takes over ``whole``. Raises ModelError if it does not run."""
    model, asked = whole.model, f"--tensor-parallel is {cut.num_ranks}"
    name = type(model).__name__
    for layer_name, one in cuts.linears.items():
        layer: Any = model.get_submodule(layer_name)
        setattr(layer, "out_features" if one.by_outputs else "in_features", one.size)
        if f"{layer_name}.bias" in cuts.dropped:
            layer.bias = None
    for path in cuts.silent:
        parent, _, own_name = path.rpartition(".")
        setattr(model.get_submodule(parent), own_name, _Silent())
    for path, its in cuts.recurrent.items():
        its.settle(model.get_submodule(path))
    heads = _heads_of_layers(whole, cuts, cut)
    for before, (num_q_heads, num_kv_heads) in zip(whole.layers, heads, strict=True):
        if _GROUPS in vars(before.module):
            setattr(before.module, _GROUPS, num_q_heads // num_kv_heads)
    compressed = () if whole.compressed is None else whole.compressed.modules
    for module in (*whole.recurrent, *compressed):
        vars(module).pop("forward", None)  # that of ``whole``; the part gives them its own
    model.set_experts_implementation("eager")  # others take few numbers of columns only; ``bind`` sets ours
    try:
        probed = probe_layers(model)
    except ModelError as error:
        raise ModelError(f"{asked}, but a part of {name} does not run alone: {error}") from error
    # ``whole`` may have switched the layers' own scaling of queries off, so this probe does not see it.
    attention = [
        replace(one, temperature=before.temperature) for one, before in zip(probed.attention, whole.layers, strict=True)
    ]
    if [(layer.num_q_heads, layer.num_kv_heads) for layer in attention] != heads:
        raise ModelError(
            f"{asked}, but the plan of transformers for {name} does not cut its attention by heads: take 1"
        )
    states = _divided_states(whole, cuts)
    own_states = tuple(layer.tensors for layer in probed.states)
    if own_states != tuple(tuple(one.of_rank(cut.num_ranks) for one in tensors) for tensors in states):
        raise ModelError(f"{asked}, but a part of {name} does not keep the part of its states: take 1")
    layers = Layers(attention, probed.states, probed.compressed)
    shape = replace(
        whole.shape,
        num_q_heads=max((layer.num_q_heads for layer in attention), default=0),
        num_kv_heads=max((layer.num_kv_heads for layer in attention), default=0),
        layer_sizes=pool_sizes(layers),
        states=own_states,
        whole_layers=WholeLayers(whole.shape.kv_sizes, states),
    )
    part = TransformersModel(model, layers, shape)
    part.use_our_attention()
    return part


def _heads_of_layers(whole: TransformersModel, cuts: Cuts, cut: Cut) -> list[tuple[int, int]]:
    """The (query heads, K/V heads) that a rank must get in each layer. Raises ModelError if only some layers are cut by heads."""
    linears = {whole.model.get_submodule(path) for path in cuts.linears}
    by_heads = {not linears.isdisjoint(layer.module.modules()) for layer in whole.layers}
    if len(by_heads) > 1:
        raise ModelError(
            f"--tensor-parallel is {cut.num_ranks}, but the plan of transformers for {type(whole.model).__name__} cuts the "
            "attention of some layers only, which is not served yet: take 1"
        )
    if True not in by_heads:
        return [(layer.num_q_heads, layer.num_kv_heads) for layer in whole.layers]
    return [(layer.num_q_heads // cut.num_ranks, len(cut.heads(layer.num_kv_heads))) for layer in whole.layers]


def _divided_states(whole: TransformersModel, cuts: Cuts) -> tuple[tuple[StateTensor, ...], ...]:
    """The whole model's states, with the sections of those that ranks divide."""
    by_layer = {whole.model.get_submodule(path): one for path, one in cuts.recurrent.items()}
    return tuple(
        tensors if (one := by_layer.get(layer)) is None else one.divided(tensors)
        for layer, tensors in zip(whole.recurrent, whole.shape.states, strict=True)
    )


class _Silent(nn.Module):
    """Takes the place of a module whose result another rank adds."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Zeros."""
        return torch.zeros_like(hidden)


def sum_outputs(model: PreTrainedModel, cuts: Cuts, collectives: Collectives) -> None:
    """Make what is cut sum its results over ranks: layers that are cut by inputs, experts, and recurrent layers.

    A layer that is part of a larger replaced part is the last one there. A recurrent layer calls its output product once for each
    part of a step. So what it returns is summed, once.
    """

    def add_up(_layer: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return collectives.sum(output)

    modules = dict(model.named_modules())
    inside = {f"{path}.{name}" for path, one in cuts.recurrent.items() for name in one.linears}
    by_inputs = (name for name, cut in cuts.linears.items() if not cut.by_outputs and name not in inside)
    for name in (*by_inputs, *cuts.experts, *cuts.recurrent):
        layer = modules.get(name) or modules[name.rpartition(".")[0]]
        layer.register_forward_hook(add_up)
