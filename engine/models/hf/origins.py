"""Finds out of which checkpoint matrices transformers makes a parameter, by watching it load tensors without numbers.

transformers renames a checkpoint's tensors, stacks those of experts, and cuts others in parts, by rules of its own for each type. A
:class:`Traced` tensor goes through these rules like any other, and remembers what happened to it. What it does not understand
leaves it without an origin: then the parameter is made of full weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

_KEEPING = ("contiguous", "detach", "requires_grad_")
_STACK, _CONCATENATE, _TRANSPOSE = ("stack",), ("cat", "concat", "concatenate"), ("transpose", "swapaxes")
_DIVIDE = ("chunk", "split")


@dataclass(frozen=True, slots=True)
class Rows:
    """Some outputs and inputs of a checkpoint's matrix. In a tensor of experts, outputs are numbered through."""

    name: str
    outs: range
    ins: range


Matrix = tuple[Rows, ...]
"""A matrix ``[out, in]``: pieces below each other."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a parameter consists of."""

    matrices: tuple[Matrix, ...]  # one, or those of all experts
    is_stack: bool  # the parameter has a dimension of experts
    is_transposed: bool = False  # it has inputs before outputs

    @property
    def rows(self) -> list[Rows]:
        """All pieces."""
        return [rows for matrix in self.matrices for rows in matrix]

    def part(self, dim: int, ranges: Sequence[range]) -> Origin | None:
        """The origin of a part of the parameter: some ranges along ``dim``, one behind the other.

        ``dim`` is not that of experts. None for several ranges of inputs.
        """
        if dim != _outs_dim(self):
            return self._of_inputs(*ranges) if len(ranges) == 1 else None
        matrices = (
            tuple(rows for one in ranges for rows in _some(matrix, one.start, one.stop)) for matrix in self.matrices
        )
        return replace(self, matrices=tuple(matrices))

    def _of_inputs(self, part: range) -> Origin:
        some = slice(part.start, part.stop)
        matrices = (tuple(replace(rows, ins=rows.ins[some]) for rows in matrix) for matrix in self.matrices)
        return replace(self, matrices=tuple(matrices))


class Traced(torch.Tensor):
    """A tensor without numbers, on "meta" wherever it is sent, that knows its origin."""

    origin: Origin | None  # None: it is not made of whole rows alone
    sources: frozenset[str]  # names of all tensors that it is made of

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, has_inputs_first: bool = False) -> Traced:
        """A checkpoint's matrix ``[out, in]``, or experts ``[experts, out, in]`` in one tensor, which may have inputs first."""
        if len(shape) == 2:
            origin = Origin(((Rows(name, range(shape[0]), range(shape[1])),),), is_stack=False)
        else:
            num_experts, num_outs, num_ins = (shape[0], *reversed(shape[1:])) if has_inputs_first else shape
            starts = range(0, num_experts * num_outs, num_outs)
            matrices = tuple((Rows(name, range(start, start + num_outs), range(num_ins)),) for start in starts)
            origin = Origin(matrices, is_stack=True, is_transposed=has_inputs_first)
        return _traced(torch.empty(shape, dtype=dtype, device="meta"), origin, frozenset((name,)))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See torch.overrides."""
        kwargs = kwargs or {}
        if func is torch.Tensor.to:
            args, kwargs = args[:1], {"dtype": _dtype_of(args, kwargs)}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        given = list(_tensors((args, tuple(kwargs.values()))))
        sources = frozenset().union(*(one.sources for one in given if isinstance(one, Traced)))
        if func is torch.Tensor.__setitem__ and isinstance(args[0], Traced):
            _traced(args[0], None, sources)
        if isinstance(result, torch.Tensor):
            return _traced(result, _origin(func, args, kwargs, given), sources)
        if type(result) in (tuple, list) and result and all(isinstance(one, torch.Tensor) for one in result):
            origins = _divided(func, args, kwargs, result)
            return tuple(_traced(one, origin, sources) for one, origin in zip(result, origins, strict=True))
        return result


def _traced(tensor: torch.Tensor, origin: Origin | None, sources: frozenset[str]) -> Traced:
    found = tensor if isinstance(tensor, Traced) else tensor.as_subclass(Traced)
    found.origin, found.sources = origin, sources
    return found


def _dtype_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    """The dtype after ``Tensor.to``."""
    tensor, *others = args
    for one in (*others, *kwargs.values()):
        if isinstance(one, torch.dtype):
            return one
    dtype: torch.dtype = tensor.dtype
    return dtype


def _origin(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], given: Sequence[torch.Tensor]
) -> Origin | None:
    """The origin of a function's result; None if it changes more than the order of rows."""
    origins = [one.origin for one in given if isinstance(one, Traced) and one.origin is not None]
    if not origins or len(origins) < len(given):
        return None
    name, first = func.__name__, origins[0]
    if func is torch.Tensor.to or name in _KEEPING or (name == "__getitem__" and args[1] is ...):
        return first
    if name in _TRANSPOSE:
        num_dims = given[0].dim()
        dims = {one % num_dims for one in (*args[1:], *kwargs.values()) if isinstance(one, int)}
        is_of_matrices = dims == {num_dims - 2, num_dims - 1}
        return replace(first, is_transposed=not first.is_transposed) if is_of_matrices else None
    if name not in (*_STACK, *_CONCATENATE):
        return None
    return _combined(origins, _dim(args, kwargs) % (given[0].dim() + (name in _STACK)), is_stacked=name in _STACK)


def _combined(origins: list[Origin], dim: int, *, is_stacked: bool) -> Origin | None:
    """The origin of several tensors along ``dim``; None unless they are experts, or pieces of the same ones."""
    first = origins[0]
    if len({(one.is_stack, one.is_transposed, len(one.matrices)) for one in origins}) > 1:
        return None
    if is_stacked:
        matrices = tuple(one.matrices[0] for one in origins)
        return None if first.is_stack or dim else replace(first, matrices=matrices, is_stack=True)
    if dim != _outs_dim(first):
        return None
    joined = zip(*(one.matrices for one in origins), strict=True)
    return replace(first, matrices=tuple(tuple(rows for part in parts for rows in part) for parts in joined))


def _divided(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], parts: tuple[torch.Tensor, ...]
) -> list[Origin | None]:
    """The origins of the parts that a tensor is divided into."""
    (whole, *_), dim = args, _dim((args[0], *args[2:]), kwargs)
    origin = whole.origin if isinstance(whole, Traced) else None
    if origin is None or func.__name__ not in _DIVIDE or dim % whole.dim() != _outs_dim(origin):
        return [None] * len(parts)
    found: list[Origin | None] = []
    start = 0
    for part in parts:
        end = start + part.shape[dim]
        found.append(replace(origin, matrices=tuple(_some(matrix, start, end) for matrix in origin.matrices)))
        start = end
    return found


def _some(matrix: Matrix, start: int, end: int) -> Matrix:
    """The rows from ``start`` to ``end``."""
    found, first = [], 0
    for rows in matrix:
        outs = rows.outs[max(0, start - first) : max(0, end - first)]
        if outs:
            found.append(replace(rows, outs=outs))
        first += len(rows.outs)
    return tuple(found)


def _dim(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The dimension that a function takes after its tensors."""
    found: int = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return found


def _outs_dim(origin: Origin) -> int:
    return int(origin.is_stack) + int(origin.is_transposed)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)
