"""A transformers model without weights: whether we can serve it, its shape and its size, from ``config.json`` alone.

Parameters have shapes but no memory (torch's device "meta"). A layer's results become zeros in real memory. So the gate's forward
pass runs as usual: masks, positions and numbers that the model reads are real, only the products are not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from kvrelay.common.errors import ModelError
from kvrelay.engine.models.hf.text import full_class, is_multimodal, text_model, towers_of


class NoWeights(TorchFunctionMode):
    """In this mode, an operation on tensors on "meta" and on other devices returns zeros on the other device."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See torch.overrides."""
        kwargs = kwargs or {}
        there = {tensor.is_meta for tensor in _tensors((args, kwargs))}
        if func is torch.Tensor.__getitem__ and args[0].is_meta:
            return func(*args, **kwargs)  # indexing a weight by real numbers
        if True not in there or False not in there:
            try:
                result = func(*args, **kwargs)
            except NotImplementedError:  # copying a tensor without memory to a real device
                return func(*_mapped(args, _real), **_mapped(kwargs, _real))
            # A real tensor that is moved to a weight's device stays real.
            return _mapped(result, _real) if False in there else result
        return _mapped(func(*_mapped(args, _meta), **_mapped(kwargs, _meta)), _real)


def model_without_weights(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of ``config``, with parameters that take no memory. Raises ModelError if there is none."""
    try:
        with torch.device("meta"):
            model = text_model(config, dtype=dtype, attn_implementation="eager", experts_implementation="eager")
    except Exception as error:  # a model's own code may raise anything
        raise ModelError(f"transformers makes no model of this config.json: {type(error).__name__}: {error}") from error
    return model.eval()


def float32_names(model: PreTrainedModel, dtype: torch.dtype) -> frozenset[str]:
    """The tensors that transformers loads in float32, although the model is asked for in ``dtype``."""
    kept = set() if dtype == torch.float32 else set(model._keep_in_fp32_modules_strict or ())
    tensors = model.state_dict().items()
    return frozenset(name for name, one in tensors if one.is_floating_point() and any(part in name for part in kept))


def buffers_nbytes(model: PreTrainedModel, wide: frozenset[str]) -> int:
    """Bytes of the checkpoint's tensors that are no parameters. ``wide``: the names of those in float32."""
    buffers = dict(model.named_buffers())
    kept = {name: buffers[name] for name in model.state_dict() if name in buffers}
    return sum(one.numel() * (4 if name in wide else one.itemsize) for name, one in kept.items())


def is_published_full(model: PreTrainedModel, name: str) -> bool:
    """Whether transformers takes this weight for full in every quantised checkpoint."""
    return any(part in name for part in model._keep_in_fp32_modules or ())


def num_tower_parameters(config: PreTrainedConfig) -> int:
    """Parameters of the towers of a multimodal type; 0 for others."""
    if not is_multimodal(config):
        return 0
    with torch.device("meta"):
        full = full_class(config)(config)
    return sum(one.numel() for parent, name, _ in towers_of(full) for one in getattr(parent, name).parameters())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with ``change`` applied to each of its tensors."""
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
