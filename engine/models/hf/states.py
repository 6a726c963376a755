"""Runs the recurrent layers of a transformers model over states in the pool: gated delta rules, Mamba, short convolutions.

Such a layer takes transformers' ``Cache``, reads its states there and replaces them. It computes sequences of equal length side by
side, and knows nothing of ragged batches. So its ``forward`` is replaced: it is called once for all sequences with one token, and
once for each block of a prompt, with a cache that has the states of those sequences (:mod:`kvrelay.engine.kv.states`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvrelay.engine.config.model import StateTensor
from kvrelay.engine.kv.states import Part, StateStep

_CACHE_ARGUMENTS = ("cache_params", "past_key_values", "past_key_value")
_MASK = "attention_mask"
_HIDDEN = "hidden_states"

Forward = Callable[..., Any]


class _Cache:
    """Takes the place of transformers' ``Cache`` in one call of one layer. It always has a previous state, at first zeros."""

    def __init__(self, tensors: dict[tuple[str, int], torch.Tensor]) -> None:
        """``tensors``: by kind and index, each ``[num_seqs, *shape]``; they are changed in place."""
        self._tensors = tensors

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """The last inputs of a convolution ``[num_seqs, channels, kernel_size]``, which the layer may change in place."""
        return self._tensors["conv", state_idx]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """A recurrence's state; None if the layer has none."""
        return self._tensors.get(("recurrent", state_idx))

    def update_conv_state(self, inputs: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """Append ``inputs`` ``[num_seqs, channels, num_tokens]``. Returns them behind those that the state had."""
        state = self._tensors["conv", state_idx]
        full = torch.cat((state, inputs), dim=-1)
        state.copy_(full[..., -state.shape[-1] :])
        return full

    def update_recurrent_state(self, state: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """Replace a state."""
        return self._tensors["recurrent", state_idx].copy_(state)

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """Whether the layer continues."""
        return True

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        """Whether earlier states are kept, to go back to them."""
        return False


class _Recorder(_Cache):
    """A cache without states that notes which ones a layer keeps."""

    def __init__(self) -> None:
        super().__init__({})
        self.tensors: list[StateTensor] = []

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """See transformers."""
        return None

    def update_conv_state(
        self,
        inputs: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """See transformers."""
        self._note("conv", state_idx, inputs[..., -(conv_kernel_size or inputs.shape[-1]) :])
        return inputs

    def update_recurrent_state(self, state: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """See transformers."""
        self._note("recurrent", state_idx, state)
        return state

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """For attention, which has no state here."""
        return keys, values

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """See transformers."""
        return False

    def _note(self, kind: str, index: int, state: torch.Tensor) -> None:
        dtype = str(state.dtype).removeprefix("torch.")
        shape = tuple(state.shape[1:])
        self.tensors.append(StateTensor(kind, index, shape, dtype, shape_nbytes(shape, state.dtype)))


def shape_nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a contiguous tensor."""
    return torch.Size(shape).numel() * dtype.itemsize


def state_candidates(model: PreTrainedModel, others: set[int]) -> list[nn.Module]:
    """The modules that may keep a state: they take a cache, contain none that does, and are not among ``others`` (ids)."""
    takers = {name: one for name, one in model.named_modules() if name and _cache_argument(one.forward) is not None}
    return [
        module
        for name, module in takers.items()
        if id(module) not in others
        and isinstance(getattr(module, "layer_idx", None), int)
        and not any(other.startswith(f"{name}.") for other in takers)
    ]


@contextmanager
def recorded_states(candidates: list[nn.Module]) -> Iterator[list[tuple[nn.Module, tuple[StateTensor, ...]]]]:
    """A context in which the candidates note their states; gives, in order of their calls, those that keep any."""
    found: list[tuple[nn.Module, tuple[StateTensor, ...]]] = []

    def record(module: nn.Module) -> Forward:
        plain = _PlainLayer(module.forward)

        @functools.wraps(plain.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            recorder = _Recorder()
            result = plain.call(plain.arguments(args, kwargs), recorder)
            if recorder.tensors:
                found.append((module, tuple(recorder.tensors)))
            return result

        return forward

    before = [vars(module).get("forward") for module in candidates]
    for module in candidates:
        module.forward = record(module)
    try:
        yield found
    finally:
        for module, replaced in zip(candidates, before, strict=True):
            del module.forward
            if replaced is not None:
                module.forward = replaced


def keep_states(
    module: nn.Module,
    layer: int,
    step_states: Callable[[], StateStep | None],
    whole: Callable[[torch.Tensor, StateStep, int], torch.Tensor] | None = None,
) -> None:
    """Replace the forward pass of a recurrent layer. ``layer``: its number among these.

    ``step_states``: those of the step under way; None outside of steps, when the layer computes as transformers does. ``whole``:
    computes a whole step, of ``[1, num_tokens, hidden]``, where the backend has kernels for it.
    """
    plain = _PlainLayer(module.forward)

    @functools.wraps(plain.forward)  # keeps its signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        step = step_states()
        if step is None:
            return plain.forward(*args, **kwargs)
        given, outputs = plain.arguments(args, kwargs), []
        if whole is not None and step.whole is not None:
            return whole(given[_HIDDEN], step, layer)
        for part in step.parts:
            states = step.pool.read(part, layer)
            tensors = {(one.kind, one.index): tensor for one, tensor in step.pool.tensors(layer, states)}
            output = plain.call(_of_part(given, part), _Cache(tensors))
            hidden = output[0] if isinstance(output, tuple) else output
            outputs.append(hidden.reshape(1, -1, hidden.shape[-1]))
            step.pool.write(part, layer, states)
        result = torch.cat(outputs, dim=1)
        return (result, *output[1:]) if isinstance(output, tuple) else result

    module.forward = forward


class _PlainLayer:
    """A layer's own forward pass, called with a cache of ours."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self._signature = inspect.signature(forward)
        kinds = {name: one.kind for name, one in self._signature.parameters.items()}
        self._others = next((name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_KEYWORD), None)
        self._cache = _cache_argument(forward)

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """A call's arguments by name, without a mask: parts of a step have none."""
        bound = self._signature.bind(*args, **kwargs).arguments
        others = bound.pop(self._others, {}) if self._others else {}
        return {name: None if name == _MASK else value for name, value in (bound | others).items()}

    def call(self, arguments: dict[str, Any], cache: _Cache) -> Any:
        """Call it with ``cache`` in the place of transformers'."""
        assert self._cache is not None, f"{self.forward} takes no cache"
        return self.forward(**{**arguments, self._cache: cache})


def _of_part(arguments: dict[str, Any], part: Part) -> dict[str, Any]:
    """The part's rows of each tensor ``[1, num_tokens, …]``, as ``[num_seqs, num_tokens of each, …]``."""
    num_tokens = next(value for value in arguments.values() if isinstance(value, torch.Tensor)).shape[1]

    def cut(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(cut, value))
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[:2] != (1, num_tokens):
            return value
        rows = value[0, part.first : part.end]
        return rows.reshape(part.num_seqs, part.num_tokens, *rows.shape[1:])

    return {name: cut(value) for name, value in arguments.items()}


def _cache_argument(forward: Forward) -> str | None:
    parameters = inspect.signature(forward).parameters
    return next((name for name in _CACHE_ARGUMENTS if name in parameters), None)
