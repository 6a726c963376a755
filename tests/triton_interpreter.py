"""Triton's interpreter beside a numpy that is newer than it. For tests of kernels on a CPU; nothing for those on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from triton.runtime import interpreter


def mend_loops(patch: pytest.MonkeyPatch) -> None:
    """Up to Triton 3.6 a loop's bounds, arrays of one element, become integers in a way that numpy 2.4 no longer allows."""
    original = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch.setattr(interpreter, "_patch_lang_tensor", patch_lang_tensor)
