"""What a rank has of a recurrent layer: some of its key heads, with the value heads that read them.

A gated delta rule computes each head by itself, from the rows of its projections and its channels of the convolution. So a rank's
heads need nothing of others, and only the output product is summed. If the ranks do not divide the key heads, layers stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from kvrelay.engine.config.cut import Cut
from kvrelay.engine.config.model import StateTensor
from kvrelay.engine.models.hf.ranks.ranges import LinearCut, ParameterCut, shares


@dataclass(frozen=True, slots=True)
class RecurrentCut:
    """A rank's part of a recurrent layer. Names are relative to the layer. What is not named stays whole."""

    linears: Mapping[str, LinearCut]
    parameters: Mapping[str, ParameterCut]  # of other modules
    sizes: Mapping[str, int]  # attributes that the layer computes with, and what they are in the part
    states: Mapping[str, tuple[int, ...]]  # by kind of a state's tensor: its sections

    def divided(self, tensors: tuple[StateTensor, ...]) -> tuple[StateTensor, ...]:
        """The tensors of the whole layer's state, with their sections."""
        return tuple(replace(one, sections=self.states[one.kind]) for one in tensors)

    def settle(self, layer: nn.Module) -> None:
        """Give the layer, whose parameters are cut already, the sizes of the part."""
        for path, size in self.sizes.items():
            module, _, name = path.rpartition(".")
            setattr(layer.get_submodule(module), name, size)


def recurrent_cut(model_type: str, layer: nn.Module, cut: Cut) -> RecurrentCut | None:
    """The rank's part of a layer in a decoder of ``model_type``; None: it stays whole."""
    sections_of = _GATED_DELTA_RULES.get(model_type)
    return None if sections_of is None else _gated_delta_rule(layer, sections_of(layer), cut)


def _gated_delta_rule(layer: Any, sections: Mapping[str, tuple[int, ...]], cut: Cut) -> RecurrentCut | None:
    """``sections``: of the outputs of each projection. A rank has an equal share of each."""
    if layer.num_k_heads % cut.num_ranks:
        return None
    channels = (layer.key_dim, layer.key_dim, layer.value_dim)

    def its(*sizes: int) -> tuple[range, ...]:
        return shares(sizes, cut.rank, cut.num_ranks)

    of_heads = ParameterCut(0, its(layer.num_v_heads))
    heads = {name: getattr(layer, name) for name in ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")}
    convolution = {f"conv1d.{name}": layer.conv_dim for name in ("in_channels", "out_channels", "groups")}
    return RecurrentCut(
        {name: LinearCut(True, its(*sizes)) for name, sizes in sections.items()}
        | {"out_proj": LinearCut(False, its(layer.value_dim))},
        {"conv1d.weight": ParameterCut(0, its(*channels)), "A_log": of_heads, "dt_bias": of_heads},
        {name: size // cut.num_ranks for name, size in (heads | convolution).items()},
        {"conv": channels, "recurrent": (layer.num_v_heads,)},
    )


def _by_key_heads(layer: Any) -> dict[str, tuple[int, ...]]:
    """All rows of a key head and its value heads follow each other."""
    return {"in_proj_qkvz": (2 * (layer.key_dim + layer.value_dim),), "in_proj_ba": (2 * layer.num_v_heads,)}


def _by_kinds(layer: Any) -> dict[str, tuple[int, ...]]:
    """Rows of all key heads, then of all value heads."""
    return {
        "in_proj_qkv": (layer.key_dim, layer.key_dim, layer.value_dim),
        "in_proj_z": (layer.value_dim,),
        "in_proj_b": (layer.num_v_heads,),
        "in_proj_a": (layer.num_v_heads,),
    }


# By type of the decoder: the order of the projections' outputs. The tests run each type.
_GATED_DELTA_RULES: dict[str, Callable[[Any], dict[str, tuple[int, ...]]]] = {
    "qwen3_next": _by_key_heads,
    "qwen3_5_text": _by_kinds,
    "qwen3_5_moe_text": _by_kinds,
}
