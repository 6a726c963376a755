"""Calls the compiled C++ code beside it (:mod:`kvrelay.engine.backends.cpu.native.compiled`).

The library uses the OpenMP runtime that torch has already loaded, so that both share their threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path

import torch

from kvrelay.common.kv_geometry import Chunk, Window, window_size
from kvrelay.engine.backends.cpu.native.compiled import CpuKernelsError, find_library
from kvrelay.engine.backends.cpu.native.pages import LargePages

_HEAD_SIZES = (32, 64, 96, 128, 192, 256)
_LANES = 16
_PANEL = 48  # outputs in one panel of a packed weight


class Step(ctypes.Structure):
    """The data that all layers of a step share; see ``struct Step`` in step.h. The maker keeps the memory alive."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("pool", "cos", "sin", "positions", "slots", "block_tables", "seq_lens")),
        *((name, ctypes.c_void_p) for name in ("query_starts", "last_seen")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_rows", "max_blocks")),
        *(
            (name, ctypes.c_int64)
            for name in ("block_stride", "q_heads", "kv_heads", "block_size", "key_size", "value_size", "rotary_size")
        ),
    ]


class CpuKernels:
    """The loaded library. All tensors are bf16 on the CPU and contiguous, unless a method says otherwise."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._pages = LargePages()
        pointer, integer, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        self._rms_norm = library.kvrelay_rms_norm
        self._rms_norm.argtypes = (pointer, pointer, pointer, pointer, integer, integer, real)
        self._silu_mul = library.kvrelay_silu_mul
        self._silu_mul.argtypes = (pointer, pointer, integer, integer)
        self._clamped_swiglu = library.kvrelay_clamped_swiglu
        self._clamped_swiglu.argtypes = (pointer, pointer, integer, integer, real, real)
        self._argmax = library.kvrelay_argmax
        self._argmax.argtypes = (pointer, pointer, integer, integer)
        self._rotary = library.kvrelay_rotary_kv_write
        self._rotary.argtypes = (pointer, integer, pointer, pointer, pointer, integer, integer, integer, pointer)
        self._attention = library.kvrelay_attention
        self._attention.argtypes = (pointer, integer, pointer, integer, integer, real, pointer, pointer)
        self._pack = library.kvrelay_pack_weight
        self._pack.argtypes = (pointer, pointer, integer, integer)
        self._linear = library.kvrelay_linear
        self._linear.argtypes = (pointer, pointer, pointer, pointer, integer, integer, integer)
        self._grouped_linear = library.kvrelay_grouped_linear
        self._grouped_linear.argtypes = (*(pointer,) * 5, *(integer,) * 3)
        self._add_low_rank = library.kvrelay_add_low_rank
        self._add_low_rank.argtypes = (pointer, integer, *(pointer,) * 3, integer, pointer, integer, pointer, integer)
        # Without bf16 dot products, the kernels multiply floats.
        self.has_bf16_dot_products: bool = bool(library.kvrelay_has_bf16_dot_products())
        for function in (
            self._rms_norm, self._silu_mul, self._argmax, self._rotary, self._attention, self._pack, self._linear,
            self._grouped_linear, self._clamped_swiglu, self._add_low_rank,
        ):  # fmt: skip
            function.restype = None

    @classmethod
    def load(cls, cache_dir: Path) -> CpuKernels:
        """Compile if necessary, and load. Raises CpuKernelsError."""
        path = find_library(cache_dir)
        try:
            return cls(ctypes.CDLL(str(path)))
        except (OSError, AttributeError) as error:
            raise CpuKernelsError(f"{path} cannot be loaded: {error}") from error

    @staticmethod
    def fit(*, head_sizes: Iterable[int], widths: tuple[int, ...], rotary_size: int = 0) -> bool:
        """Whether the kernels support heads (keys and values) of these sizes, and norms and activations of these widths.

        ``rotary_size``: dimensions of a head that they rotate.
        """
        has_heads = all(size in _HEAD_SIZES for size in head_sizes)
        return has_heads and all(map(CpuKernels.fits_width, widths)) and rotary_size % (2 * _LANES) == 0

    @staticmethod
    def fits_width(width: int) -> bool:
        """Whether the kernels support norms and activations of this width."""
        return width % _LANES == 0

    def rms_norm(
        self, hidden: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """If ``hidden`` is given, ``residual += hidden`` in place.

        Returns the norm of ``residual`` ``[..., width]`` times ``weight``.
        """
        out = torch.empty_like(residual)
        width = residual.shape[-1]
        added = None if hidden is None else hidden.data_ptr()
        rows = residual.numel() // width
        self._rms_norm(added, residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, eps)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of ``[num_tokens, 2 * width]``."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, width))
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, width)
        return out

    def clamped_swiglu(self, gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
        """:class:`kvrelay.engine.config.experts.ClampedSwiglu` of ``[num_tokens, 2 * width]``."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, width))
        self._clamped_swiglu(gate_up.data_ptr(), out.data_ptr(), rows, width, alpha, limit)
        return out

    def pack_weight(self, weight: torch.Tensor, num_experts: int = 1) -> torch.Tensor:
        """``weight`` ``[outputs, inputs]`` (inputs even) in the layout of :meth:`linear`. It has up to 47 more outputs for each
        expert.

        With several experts, their weights are stacked, and the layout is that of :meth:`grouped_linear`.
        """
        outputs, inputs = weight.shape[0] // num_experts, weight.shape[1]
        if inputs % 2:
            raise ValueError(f"a weight of {inputs} inputs; they are multiplied in pairs")
        weight = weight.contiguous()
        panels = self._pages.empty((num_experts, -(-outputs // _PANEL) * _PANEL, inputs), weight.dtype)
        for expert in range(num_experts):
            self._pack(weight[expert * outputs].data_ptr(), panels[expert].data_ptr(), outputs, inputs)
        return panels

    def linear(
        self, hidden: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None, num_outputs: int
    ) -> torch.Tensor:
        """``hidden @ weight.T + bias``, ``[rows, num_outputs]``; ``panels`` from :meth:`pack_weight`, ``bias`` in fp32."""
        rows, inputs = hidden.shape
        out = hidden.new_empty((rows, num_outputs))
        added = None if bias is None else bias.data_ptr()
        self._linear(hidden.data_ptr(), panels.data_ptr(), added, out.data_ptr(), rows, num_outputs, inputs)
        return out

    def grouped_linear(
        self,
        hidden: torch.Tensor,
        panels: torch.Tensor,
        bias: torch.Tensor | None,
        starts: torch.Tensor,
        num_outputs: int,
    ) -> torch.Tensor:
        """Like :meth:`linear`, but rows ``starts[e] .. starts[e + 1] - 1`` use the weight and the bias of expert ``e``.

        ``starts`` ``[num_experts + 1]`` int64. Only weights of experts with rows are read.
        """
        rows, inputs = hidden.shape
        out = hidden.new_empty((rows, num_outputs))
        added = None if bias is None else bias.data_ptr()
        self._grouped_linear(
            hidden.data_ptr(),
            panels.data_ptr(),
            added,
            out.data_ptr(),
            starts.data_ptr(),
            len(panels),
            num_outputs,
            inputs,
        )
        return out

    def add_low_rank(
        self, table: int, num_parts: int, groups: tuple[int, int, int, int], hidden: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Add the adapters' products of ``hidden`` ``[rows, inputs]`` to ``out`` ``[rows, outputs]``.

        ``table``: address of ``[slots, num_parts]`` of ``struct LowRankPart`` in low_rank.cpp. ``groups``: addresses of the arrays
        of TokenGroups, in its order, and the number of groups. Addresses, because reading them off arrays would take longer than
        small products.
        """
        self._add_low_rank(table, num_parts, *groups, hidden.data_ptr(), hidden.shape[1], out.data_ptr(), out.shape[1])

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """The likeliest token of each row of ``[n, vocab]``, ``[n]`` int64."""
        tokens = torch.empty(len(logits), dtype=torch.int64)
        self._argmax(logits.data_ptr(), tokens.data_ptr(), len(logits), logits.shape[1])
        return tokens

    def rotary_kv_write(
        self, step: Step, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Rotate q and k, and write k and v into the pool. Returns the rotated q. The heads of a token must be contiguous."""
        rotated = query.new_empty(query.shape)
        self._rotary(
            ctypes.byref(step), layer, query.data_ptr(), key.data_ptr(), value.data_ptr(),
            query.stride(0), key.stride(0), value.stride(0), rotated.data_ptr(),
        )  # fmt: skip
        return rotated

    def attention(
        self,
        step: Step,
        layer: int,
        query: torch.Tensor,
        window: Window | None,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of ``query`` ``[num_tokens, q_heads, key_size]`` over the pool. Returns ``[num_tokens, q_heads, value_size]``.

        ``scale``: of the scores; None: 1 / sqrt(head_dim). ``sinks`` ``[q_heads]`` of any float type: for each head, the score of
        one more key that has no value. A token's result has the same bits whatever else is in the step, and however its sequence
        was cut into steps.
        """
        query = query.contiguous()
        out = query.new_empty(*query.shape[:2], step.value_size)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        wide = None if sinks is None else sinks.detach().float()  # must live until the kernel returns
        address = None if wide is None else wide.data_ptr()
        size = 0 if window is None else window_size(window)
        seen = (size, isinstance(window, Chunk))
        self._attention(ctypes.byref(step), layer, query.data_ptr(), *seen, scale, address, out.data_ptr())
        return out
