"""Reads a GGUF file's fields by name. What the fields mean is known to those who ask for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class GgufFile:
    """The fields and tensors of the file at ``path``. Raises ValueError if it is no GGUF file.

    A tensor's numbers stay on disk until they are read.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader  # noqa: PLC0415 - only conversions need it

        self.path = path
        self._reader = GGUFReader(path)

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the kind of model; it is also the prefix of the fields of that kind."""
        return self.text("general.architecture") or ""

    @property
    def tensors(self) -> dict[str, Any]:
        """The ``ReaderTensor`` of each name."""
        return {tensor.name: tensor for tensor in self._reader.tensors}

    def text(self, name: str) -> str | None:
        """The string of a field; None without the field."""
        field = self._reader.get_field(name)
        return None if field is None else bytes(field.parts[-1]).decode()

    def number(self, name: str, default: float) -> float:
        """The number of a field; ``default`` without the field."""
        field = self._reader.get_field(name)
        return default if field is None else float(field.parts[-1][0])
