"""Products with weight matrices on the CPU. Each implements ``Linear`` (:mod:`kvrelay.engine.models.ops`) and keeps its weight in
the layout it multiplies fastest with.

Measured on Zen 5, 2 threads, all matrices of a 135M model from DRAM: one row of bf16 takes 6 ms with our kernel, and so do eight;
10 with oneDNN's and its packed weights, twice that with ``F.linear``; 32 rows take 10 ms and 18; from 256 rows on oneDNN is as
fast. torch's int8 product of one row takes 6 ms; from about eight rows on arithmetic counts more than bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from kvrelay.engine.backends.cpu.native import CpuKernels
from kvrelay.engine.models.ops import Linear
from kvrelay.engine.weights.rounding import RoundedWeight

_MAX_INT8_ROWS = 4  # rows up to which reading half the bytes pays
_INT8_INPUTS = 16  # that torch's int8 product reads at once


class PlainLinear:
    """``F.linear``, for dtypes that oneDNN does not run on this CPU."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return F.linear(hidden, self._weight, self._bias)


class PackedLinear:
    """oneDNN, with the weight reordered once into its blocked layout."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        product: torch.Tensor = self._multiply(hidden, self._weight, self._bias, "none", [], "")
        return product


class NativeLinear:
    """Our own product (:mod:`kvrelay.engine.backends.cpu.native`): faster for few rows, and as fast as oneDNN for many."""

    def __init__(self, kernels: CpuKernels, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Repacks ``weight`` ``[out, in]`` bf16 and does not keep it; ``in`` is even."""
        self._kernels = kernels
        self._panels = kernels.pack_weight(weight)
        self._bias = None if bias is None else bias.float()
        self._num_outputs = len(weight)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        return self._kernels.linear(hidden.contiguous(), self._panels, self._bias, self._num_outputs)


class Int8Linear:
    """Weights rounded to 8 bits with one scale per output: ``hidden @ (int8 weight).T * scale``. Activations are not rounded.

    A few rows are multiplied with the 8-bit matrix. For more rows, the same integers are kept a second time as bf16, which holds
    them exactly. So the option makes few streams faster, and takes half as much memory again.

    If the number of inputs is no multiple of 16, all rows are multiplied with bf16: torch's int8 product reads 16 at once, also
    behind the last ones.
    """

    def __init__(
        self, weight: RoundedWeight, bias: torch.Tensor | None, make_linear: Callable[[torch.Tensor], Linear]
    ) -> None:
        """``weight`` ``[out, in]`` is int8, made of bf16; its values are kept. ``make_linear`` makes the product for many rows."""
        self._scale = weight.scale.to(weight.dtype)
        self._int8 = weight.values
        self._max_int8_rows = 0 if weight.shape[1] % _INT8_INPUTS else _MAX_INT8_ROWS
        self._many_rows = make_linear(weight.values.to(weight.dtype))
        self._bias = bias

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        if len(hidden) <= self._max_int8_rows:
            product = torch._weight_int8pack_mm(hidden, self._int8, self._scale)
        else:
            product = self._many_rows(hidden).mul_(self._scale)
        return product if self._bias is None else product.add_(self._bias)


def has_packed_linear(dtype: torch.dtype) -> bool:
    """Whether torch was built with oneDNN, and oneDNN runs this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    match dtype:
        case torch.float32:
            return True
        case torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        case torch.float16:
            return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False
