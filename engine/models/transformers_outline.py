"""A model of transformers without its weights: whether we serve it, its shape and its size, from ``config.json`` alone.

Parameters have shapes and no memory (torch's device "meta"); what a layer computes of them is zeros, in real memory. So the gate's
forward pass runs as ever: masks, positions and what a model asks of numbers on its way are real, only the products are not made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvrelay.common.errors import ModelError


class NoWeights(TorchFunctionMode):
    """While entered, an operation of tensors on "meta" and others gives zeros where the others are."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See torch.overrides."""
        kwargs = kwargs or {}
        there = {tensor.is_meta for tensor in _tensors((args, kwargs))}
        if func is torch.Tensor.__getitem__ and args[0].is_meta:
            return func(*args, **kwargs)  # a part of a weight, picked by numbers that are read
        if True not in there or False not in there:
            try:
                result = func(*args, **kwargs)
            except NotImplementedError:  # a tensor without memory is copied to where others are
                return func(*_mapped(args, _real), **_mapped(kwargs, _real))
            # A real tensor that is moved to where a weight is stays real.
            return _mapped(result, _real) if False in there else result
        return _mapped(func(*_mapped(args, _meta), **_mapped(kwargs, _meta)), _real)


def model_without_weights(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of ``config``; its parameters take no memory. Raises ModelError if there is none."""
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
            )
    except Exception as error:  # whatever a model's own code makes of a configuration
        raise ModelError(f"transformers makes no model of this config.json: {type(error).__name__}: {error}") from error
    return model.eval()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with each of its tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(one, change) for key, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_mapped(one, change) for one in value)
    return value


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor
