"""Finds out at load what a transformers model asks of attention: layers, shapes, windows, scores.

``set_attn_implementation`` accepts models that silently ignore it, so nothing is trusted. One forward pass of a few tokens, with
marks in place of masks, shows what each layer really gets. What we cannot compute is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kvrelay.common.errors import ModelError
from kvrelay.common.kv_geometry import Chunk, Window
from kvrelay.engine.config.model import StateTensor
from kvrelay.engine.models.hf.entries import CompressedLayers, compressed_layers
from kvrelay.engine.models.hf.parts import is_linear
from kvrelay.engine.models.hf.states import recorded_states, state_candidates
from kvrelay.engine.models.hf.text import text_part, towers_of

TEMPERATURE_SWITCH = "attn_temperature_tuning"  # attribute of an attention module
_PROBE = "kvrelay_probe"
_NUM_TOKENS = 24
_SCORES = {"scaling", "sliding_window", "softcap", "s_aux"}
# Arguments that an attention function may ignore: they concern caches, outputs and training.
_IGNORED = {
    "dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict", "cache_position",
    "layer_idx", "output_router_logits", "head_mask", "logits_to_keep", "is_causal", "position_embeddings",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Temperature:
    """Scales queries by their position, as Llama 4 does in layers without rotary embeddings.

    The layer itself would take a token's index in the batch for its position. So our attention scales, and the layer's scaling is
    switched off.
    """

    scale: float
    step: float  # tokens after which the factor grows

    def factors(self, positions: torch.Tensor) -> torch.Tensor:
        """The factors of queries at ``positions``, in float32."""
        return torch.log1p(torch.floor((positions.float() + 1.0) / self.step)) * self.scale + 1.0


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One layer, as its first call showed it."""

    module: nn.Module
    window: Window | None  # None: a token sees all tokens before it
    num_q_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    has_softcap: bool
    has_sinks: bool
    temperature: Temperature | None
    shared_with: int | None = None  # an earlier layer whose K/V it reads; None: it has its own


@dataclass(frozen=True, slots=True)
class StateLayer:
    """A recurrent layer."""

    module: nn.Module
    tensors: tuple[StateTensor, ...]  # of its state
    uncalled: tuple[nn.Module, ...]  # linear layers whose weights it reads, and which it does not call


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers that keep something of a sequence, in the order of their calls."""

    attention: list[AttentionLayer]
    states: list[StateLayer]
    compressed: CompressedLayers | None = None  # those of ``attention``, if some of them compress what they keep


class _Mark:
    """Takes the place of a mask, between the function that makes masks and the layers that use them."""

    ndim = 4
    shape = (1, 1, 1, 1)

    def __init__(self, keeps: Callable[..., Any], local_size: int | None) -> None:
        self.keeps = keeps
        self.local_size = local_size

    def to(self, *_: Any, **__: Any) -> _Mark:
        """A model may move a mask to a device or a dtype."""
        return self

    def __getitem__(self, _: Any) -> _Mark:
        """Gemma 4 cuts masks to the queries whose logits are wanted; here these are all."""
        return self


def probe_layers(model: PreTrainedModel, num_layers: int | None = None) -> Layers:
    """What the layers of ``model`` ask for. Changes the model's attention implementation.

    ``num_layers``: of a model that has lost its other layers; None: as many as its config says.

    Raises ModelError if a layer is called twice, or needs something that we do not compute.
    """
    name = type(model).__name__
    attention: list[AttentionLayer] = []
    keys: list[torch.Tensor] = []

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        layer = _layer_of(name, module, query, key, value, attention_mask, arguments)
        shared_with = next((index for index, other in enumerate(keys) if other is key), None)
        if shared_with is not None and attention[shared_with].window != layer.window:
            raise ModelError(f"{name} has layers of different windows that share keys and values: it is not served")
        attention.append(replace(layer, shared_with=shared_with))
        keys.append(key)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(_PROBE, attend)
    AttentionMaskInterface.register(
        _PROBE, lambda *_, mask_function, local_size=None, **__: _Mark(mask_function, local_size)
    )
    # A multimodal model makes masks of its own around its decoder. For text, the decoder's mean the same.
    part = text_part(model)
    if part is not model:  # the check at load compares with the whole
        part.set_attn_implementation("eager")
        _run(model, model)
    part.set_attn_implementation(_PROBE)
    _run(model, part)
    seen = list(attention)
    compressed = compressed_layers([layer.module for layer in seen], model.config)
    states = _probe_states(model, part, seen, compressed is not None)
    if num_layers is None:
        num_layers = model.config.get_text_config().num_hidden_layers
    if not seen and not states:
        raise ModelError(
            f"{name} computes attention in its own way, without transformers' interface for it: it is not served"
        )
    num_modules = len({id(layer.module) for layer in seen})
    if len(seen) != num_modules or (len(seen) != num_layers and not states):
        raise ModelError(
            f"{name} has {num_layers} layers and calls attention {len(seen)} times, in {num_modules} modules: layers that attend "
            "twice, or not at all, are not served yet"
        )
    heads = sorted({layer.num_q_heads for layer in seen})
    if len(heads) > 1:
        raise ModelError(f"{name} has layers of different numbers of query heads: {heads}; not served yet")
    return Layers(seen, states, compressed)


def _probe_states(
    model: PreTrainedModel, part: nn.Module, attention: list[AttentionLayer], is_compressed: bool
) -> list[StateLayer]:
    """The recurrent layers. Raises ModelError if transformers says that there is a state, and none is found."""
    name = type(model).__name__
    outside = {id(one) for parent, name, _ in towers_of(model) for one in getattr(parent, name).modules()}
    candidates = state_candidates(model, {id(layer.module) for layer in attention} | outside)
    called: set[nn.Module] = set()
    hooks = [
        one.register_forward_pre_hook(lambda module, _: called.add(module))
        for candidate in candidates
        for one in candidate.modules()
    ]
    try:
        with recorded_states(candidates) as found:
            if candidates:
                _run(model, part)
    except ModelError:  # another kind of cache: the module keeps nothing that we know
        found = []
    finally:
        for hook in hooks:
            hook.remove()
    if len({module for module, _ in found}) != len(found):
        raise ModelError(f"{name} calls a recurrent layer twice: it is not served")
    # transformers' ``generate`` checks this, too: such a model has more state than K/V
    if model._is_stateful and not found and not is_compressed:
        raise ModelError(f"{name} keeps a state in its own way, without transformers' cache for it: it is not served")
    return [
        StateLayer(module, tensors, tuple(one for one in module.modules() if is_linear(one) and one not in called))
        for module, tensors in found
    ]


def _run(model: PreTrainedModel, part: nn.Module) -> None:
    """A forward pass of a few tokens through ``part`` of the model. Raises ModelError."""
    # The token positions are real even if the weights have no memory (``outline.py``).
    positions = torch.arange(_NUM_TOKENS, device="cpu" if model.device.type == "meta" else model.device)[None]
    try:
        with torch.inference_mode():
            part(
                input_ids=positions % model.config.get_text_config().vocab_size, position_ids=positions, use_cache=False
            )
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} does not run with text alone and attention of ours ({type(error).__name__}: {error}): it is "
            "not served"
        ) from error


def pool_layers(layers: list[AttentionLayer]) -> list[int]:
    """For each layer, the pool's layer that it reads. Layers that share another's K/V have none of their own."""
    places: list[int] = []
    for layer in layers:
        places.append(max(places, default=-1) + 1 if layer.shared_with is None else places[layer.shared_with])
    return places


def own_windows(layers: Layers) -> tuple[Window | None, ...]:
    """The windows of the layers that have their own K/V, and of those in the pool that compress."""
    windows = tuple(layer.window for layer in layers.attention if layer.shared_with is None)
    return windows if layers.compressed is None else layers.compressed.windows(windows)


def _layer_of(
    name: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    arguments: dict[str, Any],
) -> AttentionLayer:
    given = {argument for argument, value in arguments.items() if value is not None}
    if unknown := given - _SCORES - _IGNORED:
        raise ModelError(f"{name} hands attention {', '.join(sorted(unknown))}, which we do not know: it is not served")
    causal = arguments.get("is_causal")
    if causal is False or (causal is None and getattr(module, "is_causal", True) is False):
        raise ModelError(f"{name} attends in both directions: it is not served")
    if query.shape[0] != 1 or query.shape[1] % key.shape[1] or query.shape[3] != key.shape[3]:
        raise ModelError(f"{name} hands attention queries {tuple(query.shape)} for keys {tuple(key.shape)}: not served")
    positions_device = torch.device("cpu") if query.device.type == "meta" else query.device
    return AttentionLayer(
        module=module,
        window=_window_of(name, mask, positions_device),
        num_q_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        key_size=key.shape[3],
        value_size=value.shape[3],
        has_softcap="softcap" in given,
        has_sinks="s_aux" in given,
        temperature=_temperature_of(module),
    )


def _temperature_of(module: Any) -> Temperature | None:
    if not getattr(module, TEMPERATURE_SWITCH, False) or module.use_rope:
        return None
    return Temperature(float(module.attn_scale), float(module.floor_scale))


def _window_of(name: str, mask: Any, device: torch.device) -> Window | None:
    """The window of a mask; None for plain causal attention. ``device``: that of the positions.

    Raises ModelError on a mask that is neither causal, a sliding window, nor chunks.
    """
    if mask is None:
        return None
    if not isinstance(mask, _Mark):
        raise ModelError(f"{name} makes its own attention masks, which we would ignore: it is not served")
    window = mask.local_size
    last = 2 * (window or 0) + _NUM_TOKENS
    queries = keys = torch.arange(_NUM_TOKENS)
    if window:
        # Positions around the edges of windows and chunks. A mask function depends only on positions.
        queries = _around(2 * window, last)
        keys = _around(8, window, last - window, 2 * window, last)
    # A mask may hold tensors of the model's device.
    queries, keys = queries[:, None].to(device), keys[None].to(device)
    zero = torch.tensor(0, device=device)
    kept = torch.as_tensor(mask.keeps(zero, zero, queries, keys)).expand(queries.shape[0], keys.shape[1])
    causal = keys <= queries
    if bool((kept == causal).all()):
        return None
    if window is not None and bool((kept == (causal & (keys > queries - window))).all()):
        return window
    if window is not None and bool((kept == (causal & (keys // window == queries // window))).all()):
        return Chunk(window)
    raise ModelError(f"{name} has attention masks of a kind that we do not compute: not served yet")


def _around(*positions: int) -> torch.Tensor:
    """Eight positions on both sides of each given one."""
    return torch.cat([torch.arange(max(0, position - 8), position + 8) for position in positions])
