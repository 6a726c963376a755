"""How far transformers is with a checkpoint. Its loop over a model's tensors has a progress bar; this module follows and hides it.

In the log of a worker a bar would be lines of control characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils.logging import EmptyTqdm, set_tqdm_hook


@contextmanager
def without_bar() -> Iterator[None]:
    """Show no bar in this context. Inside of ``followed`` it changes nothing."""
    previous = set_tqdm_hook(_hidden)
    if previous is not None:
        set_tqdm_hook(previous)
    try:
        yield
    finally:
        set_tqdm_hook(previous)


def _hidden(_make_bar: Callable[..., Any], args: tuple[Any, ...], _options: dict[str, Any]) -> Any:
    return EmptyTqdm(*args)  # tqdm's own bar, even a disabled one, leaves a thread


@contextmanager
def followed(progress: Callable[[int, int], None], num_bytes: int) -> Iterator[None]:
    """Call ``progress`` for each tensor that transformers loads in this context.

    ``progress`` hears (bytes loaded, ``num_bytes``). The bytes are estimated by the number of tensors. The last call, with all
    bytes, is the caller's. The hook belongs to the process, so models are loaded one at a time.
    """

    def follow(make_bar: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return _hidden(make_bar, (counted(list(args[0])), *args[1:]) if args else args, options)

    def counted(tensors: list[Any]) -> Iterable[Any]:
        for index, tensor in enumerate(tensors):
            progress(num_bytes * index // len(tensors), num_bytes)
            yield tensor

    previous = set_tqdm_hook(follow)
    try:
        yield
    finally:
        set_tqdm_hook(previous)
