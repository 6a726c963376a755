"""The linear layers of a model with our own forward pass that adapters may change, as our products combine them."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.engine.config.cut import Cut
from kvrelay.engine.config.families import FAMILIES
from kvrelay.engine.config.model import ModelConfig
from kvrelay.engine.models.adapters import AdaptedLayer, Adapters
from kvrelay.engine.models.ops import Linear


def _layer_prefixes(whole: ModelConfig) -> tuple[str, ...]:
    """What may be before a layer's number in an adapter's names.

    Beside images these are the checkpoint's names, those of transformers' modules, and those of the text alone.
    """
    text = FAMILIES[whole.architecture].text
    plain = "model.layers."
    return (plain,) if text is None else (f"{text.prefix}{plain}", f"model.{text.prefix}layers.", plain)


def in_other_stages(whole: ModelConfig, cut: Cut) -> Callable[[str], bool]:
    """A function that says whether a module (by its name) is in a layer of another stage."""
    own = cut.layers(whole.num_layers)
    numbers = [index for index in range(whole.num_layers) if index not in own]
    others = tuple(f"{prefix}{number}." for prefix in _layer_prefixes(whole) for number in numbers)
    return lambda module: module.startswith(others)


class LayerAdapters:
    """Makes the products of one decoder layer, or a rank's part of it, that adapters can change. Without ``adapters`` none can."""

    def __init__(self, adapters: Adapters | None, whole: ModelConfig, cut: Cut, index: int) -> None:
        """``whole``: the config of the whole model. ``cut``: the part that is here."""
        self._adapters = adapters
        self._whole = whole
        self._cut = cut
        self._index = index

    def qkv(self, linear: Linear) -> Linear:
        """Attention's first product."""
        whole, hidden = self._whole, range(self._whole.hidden_size)
        q_size, kv_size = whole.q_size, whole.kv_size
        kv_rows = self._elements(whole.num_kv_heads)
        return self._adapted(
            linear,
            self._layer("self_attn.q_proj", q_size, len(hidden), self._elements(whole.num_q_heads), hidden),
            self._layer("self_attn.k_proj", kv_size, len(hidden), kv_rows, hidden),
            self._layer("self_attn.v_proj", kv_size, len(hidden), kv_rows, hidden),
        )

    def o(self, linear: Linear) -> Linear:
        """Attention's last product; a rank's result is summed over ranks afterwards."""
        whole, hidden = self._whole, range(self._whole.hidden_size)
        rows = self._elements(whole.num_q_heads)
        return self._adapted(linear, self._layer("self_attn.o_proj", len(hidden), whole.q_size, hidden, rows))

    def gate_up(self, linear: Linear, *, is_shared: bool = False) -> Linear:
        """The MLP's first product. ``is_shared``: of the MLP beside experts."""
        hidden, (name, mid) = range(self._whole.hidden_size), self._mlp(is_shared=is_shared)
        columns = self._cut.columns(mid)
        return self._adapted(
            linear,
            self._layer(f"{name}.gate_proj", mid, len(hidden), columns, hidden),
            self._layer(f"{name}.up_proj", mid, len(hidden), columns, hidden),
        )

    def down(self, linear: Linear, *, is_shared: bool = False) -> Linear:
        """The MLP's last product; a rank's result is summed over ranks afterwards."""
        hidden, (name, mid) = range(self._whole.hidden_size), self._mlp(is_shared=is_shared)
        return self._adapted(linear, self._layer(f"{name}.down_proj", len(hidden), mid, hidden, self._cut.columns(mid)))

    def _mlp(self, *, is_shared: bool) -> tuple[str, int]:
        """(name, size) of an MLP."""
        if not is_shared:
            return "mlp", self._whole.intermediate_size
        facts, experts = FAMILIES[self._whole.architecture].experts, self._whole.experts
        assert facts is not None, f"{self._whole.architecture} has no experts"
        assert facts.shared is not None, f"{self._whole.architecture} has no MLP beside experts"
        assert experts is not None, f"{self._whole.architecture} has no experts"
        return facts.shared, experts.shared_size

    def _layer(self, name: str, num_outputs: int, num_inputs: int, outputs: range, inputs: range) -> AdaptedLayer:
        module, *others = (f"{prefix}{self._index}.{name}" for prefix in _layer_prefixes(self._whole))
        return AdaptedLayer(module, num_outputs, num_inputs, outputs, inputs, tuple(others))

    def _elements(self, num_heads: int) -> range:
        heads, size = self._cut.heads(num_heads), self._whole.head_dim
        return range(heads.start * size, heads.stop * size)

    def _adapted(self, linear: Linear, *layers: AdaptedLayer) -> Linear:
        return linear if self._adapters is None else self._adapters.adapted(linear, *layers)
