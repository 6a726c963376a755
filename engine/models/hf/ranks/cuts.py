"""What a rank keeps of a transformers model, by the plan for its type (:mod:`kvrelay.engine.models.hf.ranks.plan`).

Attention is cut by heads, or stays whole on every rank with all its K/V. MLPs and experts are cut by columns, after which ranks
sum. Some recurrent layers are cut by heads, too. Embeddings, norms, the head and other recurrent layers stay whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.cut import Cut
from kvrelay.engine.models.hf.model import TransformersModel
from kvrelay.engine.models.hf.ranks.plan import Kind, Plan
from kvrelay.engine.models.hf.ranks.ranges import LinearCut, ParameterCut, of_each
from kvrelay.engine.models.hf.ranks.recurrent import RecurrentCut, recurrent_cut
from kvrelay.engine.models.hf.text import text_decoder

# For each kind of an expert's matrix ``[experts, outputs, inputs]``, or transposed: where its columns are, in how many sections.
_EXPERT_SIDES = {Kind.BY_OUTPUTS: (1, 1), Kind.BY_INPUTS: (2, 1), Kind.OUTPUTS_OF_TWO: (1, 2), Kind.LAST_OF_TWO: (2, 2)}

_KEYS_AND_VALUES = (".k_proj", ".v_proj")  # ends of names of layers that make them


@dataclass(frozen=True, slots=True)
class Cuts:
    """What a rank keeps of a model. What is not named stays whole."""

    linears: dict[str, LinearCut]  # by path of the layer
    parameters: dict[str, ParameterCut]  # by path of the parameter
    dropped: frozenset[str]  # paths of biases that another rank adds
    experts: frozenset[str] = frozenset()  # paths of modules with a part of each expert, whose results must be summed
    silent: frozenset[str] = frozenset()  # paths of modules whose results another rank adds
    # By path of a layer, whose results must be summed.
    recurrent: Mapping[str, RecurrentCut] = field(default_factory=dict)

    def of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """The rank's part of the parameter ``name``, a view where that is possible; of a dropped one nothing is left."""
        if name in self.dropped:
            return whole[:0]
        cut = self.parameters.get(name)
        return whole if cut is None else cut.of(whole)


def find_cuts(whole: TransformersModel, cut: Cut) -> Cuts:
    """What a rank keeps of the model. Reads no weights: they may be on "meta".

    Raises ModelError if the type has no plan, or one that is not supported, or if its heads cannot be divided among the ranks.
    """
    plan = Plan.of(whole.model.config.get_text_config())
    if plan is None:
        name = type(whole.model).__name__
        raise ModelError(f"--tensor-parallel is {cut.num_ranks}, but transformers has no plan to cut {name}: take 1")
    return _Cutter(whole, plan, cut).cuts()


class _Cutter:
    """Follows a plan through a model."""

    def __init__(self, whole: TransformersModel, plan: Plan, cut: Cut) -> None:
        self._whole = whole
        self._plan = plan
        self._cut = cut
        self._decoder = f"{text_decoder(whole.model)[0]}."
        self._modules: dict[str, nn.Module] = dict(whole.model.named_modules())
        self._parameters = dict(whole.model.named_parameters())
        self._recurrent = {one for recurrent in whole.recurrent for one in recurrent.modules()}
        self._attention = {one: layer for layer in whole.layers for one in layer.module.modules()}
        self._linears: dict[str, LinearCut] = {}
        self._cuts: dict[str, ParameterCut] = {}

    def cuts(self) -> Cuts:
        """See :func:`find_cuts`."""
        experts: set[str] = set()
        silent: set[str] = set()
        planned = list(self._planned())
        by_kind = (Kind.BY_OUTPUTS, Kind.BY_INPUTS)
        if any(kind in by_kind and self._modules.get(name) in self._attention for name, kind in planned):
            self._require_heads()
        for name, kind in planned:
            module = self._modules.get(name)
            if kind is Kind.EXPERTS and module is not None:
                self._cut_experts(name, module)
                experts.add(name)
            elif kind is Kind.IDENTITY and type(module) is nn.Identity:
                silent.add(name)
            elif kind in (Kind.BY_OUTPUTS, Kind.BY_INPUTS) and type(module) is nn.Linear:
                self._linears[name] = self._of_linear(name, module, by_outputs=kind is Kind.BY_OUTPUTS)
            elif kind is Kind.BY_OUTPUTS and module is None and self._parameters[name].dim() == 1:
                self._cuts[name] = ParameterCut(0, (self._evenly(name, len(self._parameters[name])),))
            elif kind in (Kind.GATHERED, Kind.SPLIT) and type(module) is nn.Linear:
                if (its := self._of_fused_mlp(name)) is not None:
                    self._linears[name] = its
            elif self._parent(name) not in experts:
                raise self._refused(f"{name} of {{}} is cut by {kind.value}, which is not served yet")
        if not self._linears and not experts:
            raise self._refused("the plan of transformers for {} cuts nothing")
        recurrent = self._cut_recurrent()
        return self._with_parameters(experts, silent, recurrent)

    def _planned(self) -> Iterator[tuple[str, Kind]]:
        """Modules and parameters that the plan names and that do not stay whole, modules first."""
        for name in dict.fromkeys([*self._modules, *self._parameters]):
            if self._modules.get(name, self._modules.get(self._parent(name))) in self._recurrent:
                continue
            try:
                kind = self._plan.kind_of(name.removeprefix(self._decoder))
            except ValueError as error:
                raise self._refused(
                    f"the plan of transformers for {name} of {{}} is not served yet ({error})"
                ) from error
            if kind is not None and kind is not Kind.WHOLE:
                yield name, kind

    def _cut_recurrent(self) -> dict[str, RecurrentCut]:
        """Cut recurrent layers by heads, if their type and the number of ranks allow it."""
        model_type = self._whole.model.config.get_text_config().model_type
        paths = {module: path for path, module in self._modules.items()}
        found: dict[str, RecurrentCut] = {}
        for layer in self._whole.recurrent:
            path = paths[layer]
            if (one := recurrent_cut(model_type, layer, self._cut)) is not None:
                found[path] = one
                self._linears |= {f"{path}.{name}": linear for name, linear in one.linears.items()}
                self._cuts |= {f"{path}.{name}": parameter for name, parameter in one.parameters.items()}
        return found

    def _with_parameters(self, experts: set[str], silent: set[str], recurrent: dict[str, RecurrentCut]) -> Cuts:
        cuts, dropped = self._cuts, set()
        for name, one in self._linears.items():
            cuts[f"{name}.weight"] = ParameterCut(int(not one.by_outputs), one.ranges)
            if f"{name}.bias" not in self._parameters:
                continue
            if one.by_outputs:
                cuts[f"{name}.bias"] = ParameterCut(0, one.ranges)
            elif self._cut.rank:
                dropped.add(f"{name}.bias")
        others = frozenset(silent) if self._cut.rank else frozenset()
        return Cuts(self._linears, cuts, frozenset(dropped), frozenset(experts), others, recurrent)

    def _of_linear(self, name: str, layer: nn.Linear, *, by_outputs: bool) -> LinearCut:
        """The rank's part of a layer's outputs, or inputs. Attention gives every rank equally many."""
        size = layer.out_features if by_outputs else layer.in_features
        if (attention := self._attention.get(layer)) is None:
            return LinearCut(by_outputs, (self._columns(name, size),))
        num_heads = attention.num_kv_heads
        if name.endswith(_KEYS_AND_VALUES) and num_heads < self._cut.num_ranks and not size % num_heads:
            heads, width = self._cut.heads(num_heads), size // num_heads  # several ranks have the same head
            return LinearCut(by_outputs, (range(heads.start * width, heads.stop * width),))
        return LinearCut(by_outputs, (self._evenly(name, size),))

    def _of_fused_mlp(self, name: str) -> LinearCut | None:
        """The rank's part of an MLP's layer if gate and up are one layer; None for other layers, which stay whole."""
        mlp = self._parent(name)
        first, second = (self._modules.get(f"{mlp}.{one}") for one in ("gate_up_proj", "down_proj"))
        if (
            type(first) is not nn.Linear
            or type(second) is not nn.Linear
            or first.out_features != 2 * second.in_features
        ):
            return None
        part = self._columns(name, second.in_features)
        is_first = self._modules[name] is first
        return LinearCut(is_first, of_each(part, 2 if is_first else 1, second.in_features))

    def _cut_experts(self, name: str, module: Any) -> None:
        """Cut the parameters of a module of experts, all by the same columns."""
        if getattr(module, "has_post_expert_norm", False) or not getattr(module, "is_concatenated", True):
            raise self._refused(f"{name} of {{}} has experts of a form that is not cut yet")
        own = [f"{name}.{one}" for one, _ in module.named_parameters()]
        sides: dict[str, tuple[int, int]] = {}
        for path in own:
            kind = self._plan.kind_of(path.removeprefix(self._decoder))
            if kind not in _EXPERT_SIDES or self._parameters[path].dim() != 3:
                raise self._refused(f"transformers has no plan to cut {path} of {{}}")
            sides[path] = _EXPERT_SIDES[kind]
        counts = {self._parameters[path].shape[dim] // sections for path, (dim, sections) in sides.items()}
        if len(sides) != 2 or len(counts) != 1:
            raise self._refused(f"{name} of {{}} has experts of a form that is not cut yet")
        (size,) = counts
        part = self._columns(name, size)
        self._cuts |= {path: ParameterCut(dim, of_each(part, count, size)) for path, (dim, count) in sides.items()}

    def _evenly(self, name: str, size: int) -> range:
        if size % self._cut.num_ranks:
            raise self._refused(f"{name} of {{}} has {size} columns, which do not divide among the ranks")
        first, end = (rank * size // self._cut.num_ranks for rank in (self._cut.rank, self._cut.rank + 1))
        return range(first, end)

    def _columns(self, name: str, size: int) -> range:
        if size < self._cut.num_ranks:
            raise self._refused(f"{name} of {{}} has {size} columns, fewer than ranks")
        return self._cut.columns(size)

    def _require_heads(self) -> None:
        whole = self._whole
        num_q_heads, of_kv = whole.shape.num_q_heads, {layer.num_kv_heads for layer in whole.layers}

        def fits(num_ranks: int) -> bool:
            return not num_q_heads % num_ranks and not any(one % num_ranks and num_ranks % one for one in of_kv)

        if not fits(self._cut.num_ranks):
            fitting = filter(fits, range(1, num_q_heads + 1))
            counts, ranks = (", ".join(map(str, numbers)) for numbers in (sorted({num_q_heads, *of_kv}), fitting))
            raise ModelError(
                f"--tensor-parallel is {self._cut.num_ranks}; {whole.shape.architecture} has {counts} heads in its layers, which "
                f"fit {ranks} ranks: take one of these"
            )

    @staticmethod
    def _parent(name: str) -> str:
        return name.rpartition(".")[0]

    def _refused(self, why: str) -> ModelError:
        """``why`` has ``{}`` in the place of the model's class."""
        name = type(self._whole.model).__name__
        return ModelError(f"--tensor-parallel is {self._cut.num_ranks}, but {why.format(name)}: take 1")
