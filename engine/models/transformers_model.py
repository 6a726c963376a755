"""Runs any causal language model of transformers over our paged K/V: its layers with our attention, pool and products.

The model gets a step's tokens as one row ``[1, num_tokens]`` of ragged sequences. Its attention layers call ``_attend``, which
writes K/V into the pool and attends over the pool. No mask is made: our attention itself separates sequences, and applies causality
and windows. In the pool each layer has its own number of K/V heads and its own sizes, rounded up to what kernels load at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.model import KvSizes, ModelShape
from kvrelay.engine.config.quantisation import Quantisation, load_quantisation
from kvrelay.engine.config.tokenizer import check_tokenizer
from kvrelay.engine.kv.states import StateStep
from kvrelay.engine.models.ops import PagedOps, PagedStep, Scores
from kvrelay.engine.models.transformers_gate import (
    TEMPERATURE_SWITCH,
    AttentionLayer,
    Layers,
    Temperature,
    own_windows,
    pool_layers,
    probe_layers,
)
from kvrelay.engine.models.transformers_parts import Adapt, replace_parts
from kvrelay.engine.models.transformers_progress import followed
from kvrelay.engine.models.transformers_states import keep_states
from kvrelay.engine.models.transformers_text import decoder_name, text_class, text_decoder, text_part
from kvrelay.engine.weights.headers import check_full, check_layers, checkpoint_files, read_headers
from kvrelay.engine.weights.kv_scales import is_attention_scale
from kvrelay.engine.weights.reader import CheckpointReader

_OURS = "kvrelay"
_PLAIN = "eager"
_LEAKING_ROPES = ("dynamic", "longrope")  # their factor depends on the longest sequence of a batch
_HEAD_SIZE_STEP = 16  # attention kernels take multiples of this
_BOUND = "kvrelay_bound"  # attribute of an attention module
_UNBOUNDED = 2**20  # tokens of a sequence, for recurrent models that name no limit
_MOST_MODULES = 2**16  # of layers, heads, experts: no model comes close, and making more would take forever
_LOADING_ERRORS = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError, StrictDataclassError)


@dataclass(slots=True)
class _Running:
    """The step that the model is running."""

    step: PagedStep | None = None

    def states(self) -> StateStep | None:
        """The states of its sequences."""
        return None if self.step is None else self.step.states


@dataclass(frozen=True, slots=True)
class _Bound:
    """Our data about a model's attention module."""

    running: _Running
    index: int  # among the layers of the pool
    writes: bool  # False: it reads another layer's K/V
    sizes: KvSizes  # in the pool
    temperature: Temperature | None


class TransformersModel:
    """Runs one step's tokens through a transformers model. Made by :func:`load_model`; then call :meth:`bind`."""

    def __init__(self, model: PreTrainedModel, layers: Layers, shape: ModelShape) -> None:
        self.model = model
        self.layers = layers.attention
        self.shape = shape
        self._running = _Running()
        _, self._decoder = text_decoder(model)
        self._head, self._given = _head_of(model)
        places = pool_layers(self.layers)
        for layer, place in zip(self.layers, places, strict=True):
            writes = layer.shared_with is None
            setattr(
                layer.module, _BOUND, _Bound(self._running, place, writes, shape.kv_sizes[place], layer.temperature)
            )
        self.recurrent = [one.module for one in layers.states]
        self._read_weights = [one for recurrent in layers.states for one in recurrent.uncalled]
        for index, recurrent in enumerate(layers.states):
            keep_states(recurrent.module, index, self._running.states)

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
    def plain_attention(self) -> Iterator[None]:
        """A context in which attention is transformers' own, without the pool."""
        self._set_attention(_PLAIN)
        try:
            yield
        finally:
            self.use_our_attention()

    def _set_attention(self, name: str) -> None:
        text_part(self.model).set_attn_implementation(name)
        for layer in self.layers:
            if layer.temperature is not None:
                setattr(layer.module, TEMPERATURE_SWITCH, name == _PLAIN)

    def forward(self, token_ids: torch.Tensor, step: PagedStep) -> torch.Tensor:
        """Hidden states after the last norm: ``token_ids`` ``[num_tokens]`` -> ``[num_tokens, hidden]``.

        Side effect: writes the K/V of every token into the pool.
        """
        self._running.step = step
        try:
            output = self._decoder(input_ids=token_ids[None], position_ids=step.positions[None], use_cache=False)
        finally:
            self._running.step = None
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

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


def load_model(
    directory: Path, dtype: torch.dtype, device: torch.device, progress: Callable[[int, int], None] = lambda *_: None
) -> TransformersModel:
    """Load the checkpoint in ``directory`` to ``device``, and find out what it asks of attention.

    Weights go through the host's memory. No code of the checkpoint runs. Whatever can be checked without memory for weights is
    checked first. ``progress`` hears (bytes loaded, bytes in all).

    Raises ModelError naming what is not supported.
    """
    check_files(directory, dtype)
    num_bytes = sum(path.stat().st_size for path in checkpoint_files(directory))
    with followed(progress, num_bytes):
        model = _from_pretrained(directory, dtype, None).eval().to(device)
    progress(num_bytes, num_bytes)
    layers = probe_layers(model)
    made = TransformersModel(model, layers, shape_of(model, layers, dtype))
    made.use_our_attention()
    return made


def check_files(directory: Path, dtype: torch.dtype) -> None:
    """Check that the checkpoint's files belong to the model. Takes no memory for weights. Raises ModelError."""
    headers = read_headers(directory)
    config = load_transformers_config(directory).get_text_config()
    check_layers(directory, int(config.num_hidden_layers), headers)
    with CheckpointReader(headers, load_quantisation(directory), dtype) as reader:
        check_full(reader.headers)
    check_tokenizer(directory, int(config.vocab_size))
    _from_pretrained(directory, dtype, "meta")


def load_transformers_config(directory: Path) -> PreTrainedConfig:
    """``config.json`` as transformers reads it. Raises ModelError on an unknown type, or absurd counts."""
    try:
        config = transformers.AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except _LOADING_ERRORS as error:
        raise _not_loaded(directory, error) from error
    for name, value in config.get_text_config().to_dict().items():
        if name.startswith(("num_", "n_routed_")) and isinstance(value, int) and value > _MOST_MODULES:
            raise ModelError(f"{directory}: {name!r} is {value} in config.json; at most {_MOST_MODULES} is possible")
    return config


def load_full_config(directory: Path) -> PreTrainedConfig:
    """Like :func:`load_transformers_config`; for a quantised checkpoint the config of the full model."""
    config = load_transformers_config(directory)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # otherwise transformers would require its own library for the format
    return config


def _from_pretrained(directory: Path, dtype: torch.dtype, device_map: str | None) -> PreTrainedModel:
    """The whole model. On "meta" it takes no memory, but names and shapes of tensors are still compared."""
    how: dict[str, Any] = {
        "dtype": dtype, "attn_implementation": _PLAIN, "output_loading_info": True, "device_map": device_map,
        # Tensors of another shape are then reported like missing ones; the library's own error does not name them.
        "ignore_mismatched_sizes": True,
    }  # fmt: skip
    try:
        if (quantisation := load_quantisation(directory)) is None:
            model_class, config = text_class(load_transformers_config(directory))
            model, info = model_class.from_pretrained(
                str(directory), config=config, local_files_only=True, use_safetensors=True, **how
            )
        else:
            model, info = _dequantised(directory, quantisation, how)
    except _LOADING_ERRORS as error:
        raise _not_loaded(directory, error) from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, info[kind])):
            raise ModelError(
                f"{directory}: {len(names)} tensors are {kind.split('_')[0]} for {type(model).__name__}, {names[0]} the first: the "
                "checkpoint is not complete, or of another model"
            )
    loaded: PreTrainedModel = model
    return loaded


def _dequantised(directory: Path, quantisation: Quantisation, how: dict[str, Any]) -> tuple[PreTrainedModel, Any]:
    """A full model from stored weights, and what transformers reports about loading."""
    model_class, config = text_class(load_full_config(directory))
    with CheckpointReader(read_headers(directory), quantisation, how["dtype"]) as reader:
        tensors: dict[str, Any] = {}
        for name, header in reader.headers.items():
            if not is_attention_scale(name):
                is_meta = how["device_map"] == "meta"
                tensors[name] = torch.empty(header.shape, device="meta") if is_meta else _Unread(reader, name)
        model, info = model_class.from_pretrained(None, config=config, state_dict=tensors, **how)
        info["unexpected_keys"] = [name for name in info["unexpected_keys"] if not reader.is_zero_bias(name)]
    return model, info


@dataclass(frozen=True, slots=True)
class _Unread:
    """A checkpoint's tensor in a state dictionary; transformers reads it with ``[...]`` when it needs it."""

    reader: CheckpointReader
    name: str

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self.reader.read(self.name)


def _not_loaded(directory: Path, error: Exception) -> ModelError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ModelError(f"{directory} cannot be loaded by transformers: {reason}")


def pool_sizes(layers: list[AttentionLayer]) -> tuple[KvSizes, ...]:
    """The sizes of the layers with their own K/V, rounded up to multiples of what kernels load at once."""

    def stored(size: int) -> int:
        return -(-size // _HEAD_SIZE_STEP) * _HEAD_SIZE_STEP

    return tuple(
        KvSizes(layer.num_kv_heads, stored(layer.key_size), stored(layer.value_size))
        for layer in layers
        if layer.shared_with is None
    )


def shape_of(model: PreTrainedModel, layers: Layers, dtype: torch.dtype) -> ModelShape:
    """The shape that pool, attention and sampler need, for a model with these ``layers``."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    longest = int(getattr(config, "max_position_embeddings", None) or _UNBOUNDED)
    per_kind = rope.values() if rope and all(isinstance(one, dict) for one in rope.values()) else [rope]
    for one in per_kind:
        if one.get("rope_type") in _LEAKING_ROPES:
            # Up to this length the factor is the same for all sequences. Beyond it, one sequence would change another's.
            longest = min(longest, int(one.get("original_max_position_embeddings") or longest))
    attention = layers.attention
    windows, sizes = own_windows(attention), pool_sizes(attention)
    return ModelShape(
        architecture=type(model).__name__,
        vocab_size=int(config.vocab_size),
        num_layers=len(windows),
        num_q_heads=max((layer.num_q_heads for layer in attention), default=0),
        num_kv_heads=max((one.num_kv_heads for one in sizes), default=0),
        head_dim=max((max(one.key_size, one.value_size) for one in sizes), default=0),
        max_position_embeddings=longest,
        sliding_windows=windows,
        layer_sizes=sizes,
        states=tuple(layer.tensors for layer in layers.states),
        has_softcaps=any(layer.has_softcap for layer in attention),
        has_sinks=any(layer.has_sinks for layer in attention),
        dtype=str(dtype).removeprefix("torch."),
        # Another version may rotate or round differently.
        rope_text=f"{type(model).__name__} of transformers {transformers.__version__}",
    )
