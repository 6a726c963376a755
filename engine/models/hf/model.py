"""Runs any causal language model of transformers over our paged K/V: its layers with our attention, pool and products.

The model gets a step's tokens as one row ``[1, num_tokens]`` of ragged sequences. Its attention layers call ``_attend``, which
writes K/V into the pool and attends over the pool. No mask is made: our attention itself separates sequences, and applies causality
and windows. In the pool each layer has its own number of K/V heads and its own sizes, rounded up to what kernels load at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from kvrelay.engine.config.model import KvSizes, ModelShape
from kvrelay.engine.kv.entries import EntryStep
from kvrelay.engine.kv.states import StateStep
from kvrelay.engine.models.hf.entries import CompressedLayers, keep_entries
from kvrelay.engine.models.hf.filling import drop_layers
from kvrelay.engine.models.hf.gate import (
    TEMPERATURE_SWITCH,
    AttentionLayer,
    Layers,
    Temperature,
    own_windows,
    pool_layers,
)
from kvrelay.engine.models.hf.images import StepImages, StepInputs
from kvrelay.engine.models.hf.parts import Adapt, replace_parts
from kvrelay.engine.models.hf.recurrent import whole_step_forward
from kvrelay.engine.models.hf.states import keep_states
from kvrelay.engine.models.hf.text import decoder_name, text_class_name, text_decoder, text_part
from kvrelay.engine.models.ops import PagedOps, PagedStep, Scores, Upload
from kvrelay.engine.step.batch import Batch
from kvrelay.engine.step.plan import StepPlan
from kvrelay.engine.step.slots import Slots

_OURS = "kvrelay"
PLAIN_ATTENTION = "eager"
_LEAKING_ROPES = ("dynamic", "longrope")  # their factor depends on the longest sequence of a batch
_HEAD_SIZE_STEP = 16  # attention kernels take multiples of this
_BOUND = "kvrelay_bound"  # attribute of an attention module
_AHEAD_IN_WINDOWS_ONLY = frozenset({"gemma4_text"})  # types of ModelShape.sees_ahead_in_windows_only
_UNBOUNDED = 2**20  # tokens of a sequence, for recurrent models that name no limit


@dataclass(slots=True)
class _Running:
    """The step that the model is running."""

    step: PagedStep | None = None

    def states(self) -> StateStep | None:
        """The states of its sequences."""
        return None if self.step is None else self.step.states

    def entries(self) -> EntryStep | None:
        """What its sequences keep in layers that compress."""
        return None if self.step is None else self.step.entries


@dataclass(frozen=True, slots=True)
class _Bound:
    """Our data about a model's attention module."""

    running: _Running
    index: int  # among the layers of the pool
    writes: bool  # False: it reads another layer's K/V
    sizes: KvSizes  # in the pool
    temperature: Temperature | None


class TransformersModel:
    """Runs one step's tokens through a transformers model. Made by ``load_model``; then call :meth:`bind`."""

    def __init__(self, model: PreTrainedModel, layers: Layers, shape: ModelShape) -> None:
        self.model = model
        self.layers = layers.attention
        self.shape = shape
        self._running = _Running()
        self._inputs = StepInputs()
        self.images = StepImages(None, -1)
        _, self._decoder = text_decoder(model)
        self._embed: Any = self._decoder.get_input_embeddings()  # type: ignore[operator]
        self._takes = frozenset(inspect.signature(self._decoder.forward).parameters)
        self._per_layer: Any = None  # makes inputs of all layers of token ids (Gemma 4)
        self._padding = int(getattr(model.config.get_text_config(), "pad_token_id", None) or 0)
        if getattr(self._decoder.config, "hidden_size_per_layer_input", 0):
            self._per_layer = getattr(self._decoder, "get_per_layer_inputs", None)
        self._head, self._given = _head_of(model)
        self.compressed = layers.compressed
        if layers.compressed is not None:
            keep_entries(layers.compressed, self._running.entries)
        places = pool_layers(self.layers)
        for layer, place in zip(self.layers, places, strict=True):
            writes = layer.shared_with is None
            setattr(
                layer.module, _BOUND, _Bound(self._running, place, writes, shape.kv_sizes[place], layer.temperature)
            )
        self.states = layers.states
        self.recurrent = [one.module for one in layers.states]
        self._read_weights = [one for recurrent in layers.states for one in recurrent.uncalled]
        for index, recurrent in enumerate(layers.states):
            whole = whole_step_forward(model.config.get_text_config().model_type, recurrent.module, recurrent.tensors)
            keep_states(recurrent.module, index, self._running.states, whole)

    def bind(self, ops: PagedOps, dtype: torch.dtype, adapt: Adapt | None = None) -> None:
        """Run products, norms and experts with ``ops`` from now on. Takes over the weights.

        Steps may use other operations than ``ops``.
        """
        replace_parts(self.model, ops, dtype, adapt, self._read_weights)
        self._head, self._given = _head_of(self.model)

    def use_our_attention(self) -> None:
        """Make attention use the pool from now on."""
        AttentionInterface.register(_OURS, _attend)
        self._set_attention(_OURS)

    @contextmanager
    def first_layers(self, path: str, count: int) -> Iterator[None]:
        """A context in which the model has only the first ``count`` layers of the list at ``path``, and the shape of these."""
        before = drop_layers(self.model, path, count)
        inside = {module for layer in before[:count] for module in layer.modules()}
        whole = self.layers, self.recurrent, self.compressed, self.shape
        self.layers = [layer for layer in self.layers if layer.module in inside]
        self.recurrent = [module for module in self.recurrent if module in inside]
        if self.compressed is not None:
            self.compressed = CompressedLayers([one.module for one in self.layers])
        left = Layers(self.layers, [], self.compressed)
        windows, sizes, of_all = own_windows(left), pool_sizes(left), self.shape.whole_layers
        self.shape = replace(
            self.shape,
            num_layers=len(windows),
            num_kv_heads=max((one.num_kv_heads for one in sizes), default=0),
            head_dim=_head_dim(self.layers),
            sliding_windows=windows,
            layer_sizes=sizes,
            entries=() if self.compressed is None else self.compressed.entries,
            whole_layers=None if of_all is None else of_all.first(len(sizes), len(self.recurrent)),
            states=self.shape.states[: len(self.recurrent)],
        )
        try:
            yield
        finally:
            self.layers, self.recurrent, self.compressed, self.shape = whole
            parent, _, name = path.rpartition(".")
            setattr(self.model.get_submodule(parent), name, before)

    @contextmanager
    def plain_attention(self) -> Iterator[None]:
        """A context in which attention is transformers' own, without the pool."""
        self._set_attention(PLAIN_ATTENTION)
        try:
            yield
        finally:
            self.use_our_attention()

    def _set_attention(self, name: str) -> None:
        text_part(self.model).set_attn_implementation(name)
        for layer in self.layers:
            if layer.temperature is not None:
                setattr(layer.module, TEMPERATURE_SWITCH, name == PLAIN_ATTENTION)

    def encode(self, plan: StepPlan, slots: Slots) -> None:
        """See Model."""
        self.images.encode(plan, slots)

    def begin_step(self, batch: Batch, slots: Slots, upload: Upload) -> None:
        """See Model."""
        self._inputs = self.images.begin_step(batch, slots, upload)

    def forward(self, token_ids: torch.Tensor, step: PagedStep) -> torch.Tensor:
        """Hidden states after the last norm: ``token_ids`` ``[num_tokens]`` -> ``[num_tokens, hidden]``.

        Side effect: writes the K/V of every token into the pool.
        """
        inputs, self._inputs = self._inputs, StepInputs()
        positions = step.positions[None]
        if inputs.rotary_positions is not None:
            # With one axis a model sets the others to the same.
            positions = (
                inputs.rotary_positions[:, None] if len(inputs.rotary_positions) > 1 else inputs.rotary_positions
            )
        self._running.step = step
        try:
            output = self._decoder(**self._embedded(token_ids, inputs), position_ids=positions, use_cache=False)
        finally:
            self._running.step = None
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def _embedded(self, token_ids: torch.Tensor, inputs: StepInputs) -> dict[str, Any]:
        """What the decoder takes of the tokens."""
        if inputs.places is None or inputs.encoded is None:
            return {"input_ids": token_ids[None]}
        embeds = self._embed(token_ids[None])
        embeds[0, inputs.places] = inputs.encoded.rows.to(embeds.dtype)
        is_image = torch.zeros_like(token_ids, dtype=torch.bool)
        is_image[inputs.places] = True
        more: dict[str, Any] = {
            "visual_pos_masks": is_image[None],
            "deepstack_visual_embeds": list(inputs.encoded.deep) or None,
        }
        if self._per_layer is not None:
            # For these a part of an image is padding.
            padded = token_ids.masked_fill(is_image, self._padding)[None]
            more["per_layer_inputs"] = self._per_layer(padded, self._embed(padded))
        return {"inputs_embeds": embeds} | {name: value for name, value in more.items() if name in self._takes}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[n, hidden]`` -> ``[n, vocab]``, with the model's own scales and caps."""
        self._given.hidden = hidden[None]
        logits: torch.Tensor = self._head(
            input_ids=hidden.new_zeros(1, len(hidden), dtype=torch.int64), use_cache=False
        ).logits
        return logits[0]


@dataclass
class _Decoded(MoeModelOutputWithPast):  # type: ignore[misc]  # transformers has no types
    """A decoder's output in which everything but the hidden states is None."""

    cross_attentions: tuple[torch.Tensor, ...] | None = None
    shared_kv_states: tuple[torch.Tensor, ...] | None = None
    image_hidden_states: torch.Tensor | None = None
    image_pooler_output: torch.Tensor | None = None
    video_hidden_states: torch.Tensor | None = None
    video_pooler_output: torch.Tensor | None = None
    audio_hidden_states: torch.Tensor | None = None
    rope_deltas: torch.Tensor | None = None
    cache_params: None = None


class _Given(nn.Module):
    """Takes the decoder's place and returns hidden states that were computed already."""

    hidden: torch.Tensor

    @property
    def decoder(self) -> _Given:
        """For models whose head accesses the decoder through their base model (OPT)."""
        return self

    def forward(self, *_: Any, **__: Any) -> _Decoded:
        """The hidden states in a decoder's output."""
        return _Decoded(last_hidden_state=self.hidden)


def _head_of(model: PreTrainedModel) -> tuple[PreTrainedModel, _Given]:
    """A copy of the model without its decoder: it turns hidden states into logits."""
    given = _Given()
    decoder = getattr(model, decoder_name(model))
    for name, value in vars(decoder).items():
        if isinstance(value, float):
            setattr(given, name, value)  # a head may read a factor from its decoder (Falcon H1)
    with torch.device("meta"):
        head = type(model)(model.config).eval()
    for name, child in model.named_children():
        setattr(head, name, given if name == decoder_name(model) else child)
    return head, given


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: q ``[1, heads, num_tokens, head_dim]`` -> ``[1, num_tokens, heads, head_dim]``."""
    bound: _Bound = getattr(module, _BOUND)
    step = bound.running.step
    assert step is not None, f"attention of layer {bound.index} outside a step"
    assert attention_mask is None, f"layer {bound.index} has a mask"
    value_dim = value.shape[3]
    scores = Scores(query.shape[3] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    sizes = bound.sizes
    if bound.temperature is not None:
        query = (query * bound.temperature.factors(step.positions)[:, None]).to(query.dtype)
    if bound.writes:
        step.kv_write(_rows(key, sizes.key_size), _rows(value, sizes.value_size), bound.index)
    return step.attention(_rows(query, sizes.key_size), bound.index, scores)[None, :, :, :value_dim], None


def _rows(heads: torch.Tensor, head_dim: int) -> torch.Tensor:
    """``[1, heads, num_tokens, size]`` -> ``[num_tokens, heads, head_dim]``, contiguous, padded with zeros after ``size``."""
    rows = heads[0].transpose(0, 1)
    return functional.pad(rows, (0, head_dim - rows.shape[2])) if rows.shape[2] < head_dim else rows.contiguous()


def pool_sizes(layers: Layers) -> tuple[KvSizes, ...]:
    """The sizes of the layers with their own K/V, rounded up to multiples of what kernels load at once. No kernel reads those of
    layers that compress.
    """
    if layers.compressed is not None:
        return layers.compressed.row_sizes
    return tuple(
        KvSizes(layer.num_kv_heads, _stored(layer.key_size), _stored(layer.value_size))
        for layer in layers.attention
        if layer.shared_with is None
    )


def _stored(size: int) -> int:
    return -(-size // _HEAD_SIZE_STEP) * _HEAD_SIZE_STEP


def _head_dim(layers: list[AttentionLayer]) -> int:
    """The largest size of a head in the pool."""
    return max((_stored(max(layer.key_size, layer.value_size)) for layer in layers), default=0)


def shape_of(model: PreTrainedModel, layers: Layers, dtype: torch.dtype) -> ModelShape:
    """The shape that pool, attention and sampler need, for a model with these ``layers``."""
    config, name = model.config.get_text_config(), text_class_name(model.config)
    rope = getattr(config, "rope_parameters", None) or {}
    longest = int(getattr(config, "max_position_embeddings", None) or _UNBOUNDED)
    per_kind = rope.values() if rope and all(isinstance(one, dict) for one in rope.values()) else [rope]
    for one in per_kind:
        if one.get("rope_type") in _LEAKING_ROPES:
            # Up to this length the factor is the same for all sequences. Beyond it, one sequence would change another's.
            longest = min(longest, int(one.get("original_max_position_embeddings") or longest))
    attention = layers.attention
    windows, sizes = own_windows(layers), pool_sizes(layers)
    return ModelShape(
        architecture=name,
        vocab_size=int(config.vocab_size),
        num_layers=len(windows),
        num_q_heads=max((layer.num_q_heads for layer in attention), default=0),
        num_kv_heads=max((one.num_kv_heads for one in sizes), default=0),
        head_dim=_head_dim(attention),
        max_position_embeddings=longest,
        sliding_windows=windows,
        layer_sizes=sizes,
        states=tuple(layer.tensors for layer in layers.states),
        entries=() if layers.compressed is None else layers.compressed.entries,
        has_softcaps=any(layer.has_softcap for layer in attention),
        has_sinks=any(layer.has_sinks for layer in attention),
        sees_ahead_in_windows_only=config.model_type in _AHEAD_IN_WINDOWS_ONLY,
        dtype=str(dtype).removeprefix("torch."),
        # Another version may rotate or round differently.
        rope_text=f"{name} of transformers {transformers.__version__}",
    )
