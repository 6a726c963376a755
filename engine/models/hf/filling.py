"""Puts each parameter of a transformers model where it stays, the moment transformers has read it: on its device, cut for a rank.

So the host never holds the whole model. transformers makes a model without memory, reads a parameter, and registers it with its
module. torch has a hook for that, which is public, and which both transformers' own readers and ours go through.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel

Keep = Callable[[str, torch.Tensor], torch.Tensor]
"""(path of a parameter, the whole) -> a view of what stays"""

_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"  # otherwise transformers reads ahead without bound


@contextmanager
def filled(
    model_class: type[PreTrainedModel],
    device: torch.device,
    keep: Keep | None = None,
    first: tuple[str, int] | None = None,
) -> Iterator[type[PreTrainedModel]]:
    """A context with a class to load instead of ``model_class``. Its parameters go to ``device`` one by one.

    ``keep``: what stays of each, which gets memory of its own; None: all of it, on a CPU where the reader has it. ``first``: the
    path of a list of layers, and how many of them the model gets; tensors of others are passed over.

    The hook belongs to the process, so models are loaded one at a time. Buffers stay in the host's memory.
    """
    paths: dict[nn.Module, str] = {}
    placed: set[nn.Parameter] = set()  # tied parameters are registered twice
    is_open = True

    def make(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, *args, **kwargs)
        if is_open:  # later other code may make another model of the class
            if first is not None:
                drop_layers(self, *first)
            paths.update((module, path) for path, module in self.named_modules(remove_duplicate=True))

    def place(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or parameter.is_meta or module not in paths or parameter in placed:
            return
        whole, path = parameter.data, paths[module]
        if keep is None:
            parameter.data = whole.to(device)
        else:
            part = keep(f"{path}.{name}".removeprefix("."), whole)
            # A view would hold the whole, or the pages of the file that were read for it.
            parameter.data = part.to(device, copy=True, memory_format=torch.contiguous_format)
        placed.add(parameter)

    members: dict[str, Any] = {"__init__": make, "__module__": model_class.__module__}
    if first is not None:
        members["_keys_to_ignore_on_load_unexpected"] = [".*"]
    # By a class's name and module transformers knows how to read its checkpoints.
    made = type(model_class.__name__, (model_class,), members)
    hook = register_module_parameter_registration_hook(place)
    try:
        with _read_one_by_one():
            yield made
    finally:
        is_open = False
        hook.remove()
        paths.clear()
        placed.clear()


def drop_layers(model: nn.Module, path: str, count: int) -> nn.ModuleList:
    """Leave only the first ``count`` layers in the list at ``path``. Returns the list before."""
    parent, _, name = path.rpartition(".")
    before: Any = model.get_submodule(path)
    setattr(model.get_submodule(parent), name, before[:count])
    return before  # type: ignore[no-any-return]


@contextmanager
def _read_one_by_one() -> Iterator[None]:
    before = os.environ.get(_ONE_BY_ONE)
    os.environ[_ONE_BY_ONE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ONE_BY_ONE]
        else:
            os.environ[_ONE_BY_ONE] = before
