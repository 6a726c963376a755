"""Patches for Triton's interpreter: a GPU's rounding, and newer numpy. For tests of kernels on a CPU only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


def mend_loops(patch: pytest.MonkeyPatch) -> None:
    """Make a loop's bounds integers. Triton up to 3.6 converts arrays of one element in a way that numpy 2.4
    refuses."""
    original = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch.setattr(interpreter, "_patch_lang_tensor", patch_lang_tensor)


def mend_numbers(patch: pytest.MonkeyPatch) -> None:
    """Make casts and `tl.dot` right for bf16 and e4m3. The interpreter's casts do not round, or take integers for bits,
    and its products take bits for values."""
    builder = interpreter.InterpreterBuilder
    original_cast, original_dot, original_fp_to_fp = builder.cast_impl, builder.create_dot, builder.create_fp_to_fp

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if dst_type.scalar == tl.bfloat16 and src.dtype.scalar.is_int():
            src = original_cast(self, src, tl.float32)
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
            return original_cast(self, src, dst_type)
        bits = np.atleast_1d(src.data).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        rounded[np.isnan(np.atleast_1d(src.data))] = 0x7FC0
        return interpreter.TensorHandle(rounded.reshape(src.data.shape), tl.bfloat16)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.float8e4nv:
            return original_fp_to_fp(self, src, dst_type, rounding_mode)
        numbers = torch.from_numpy(np.atleast_1d(src.data)).to(torch.float8_e4m3fn).view(torch.uint8)
        return interpreter.TensorHandle(numbers.numpy().reshape(src.data.shape), tl.float8e4nv)

    def factor(self: Any, x: Any) -> Any:
        match x.dtype.scalar:
            case tl.bfloat16:
                return self.cast_impl(x, tl.float32)
            case tl.float8e4nv:  # fp16 has all its numbers
                numbers = torch.from_numpy(np.ascontiguousarray(x.data)).view(torch.float8_e4m3fn).half()
                return interpreter.TensorHandle(numbers.numpy(), tl.float16)
        return x

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original_dot(self, factor(self, a), factor(self, b), *rest)

    patch.setattr(builder, "cast_impl", cast_impl)
    patch.setattr(builder, "create_dot", create_dot)
    patch.setattr(builder, "create_fp_to_fp", create_fp_to_fp)
