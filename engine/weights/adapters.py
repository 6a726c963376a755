"""Reads the matrices of adapters, or a rank's part of them."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvrelay.common.adapter_files import AdapterError, AdapterFiles, LowRankHeader


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to a product's outputs from ``start`` on: ``scaling * b (a x)``."""

    start: int
    a: torch.Tensor  # [rank, inputs]
    b: torch.Tensor  # [outputs, rank]
    scaling: float


class AdapterReader:
    """An adapter's open tensor file. A context."""

    def __init__(self, files: AdapterFiles, dtype: torch.dtype, device: torch.device) -> None:
        """``dtype``: of the tensors that are returned. Raises AdapterError if the file cannot be opened."""
        self._path = files.weights_path
        self._dtype = dtype
        self._device = device
        try:
            self._file: Any = safe_open(self._path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise self._unreadable(error) from error

    def __enter__(self) -> AdapterReader:
        self._file.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Closes the file."""
        self._file.__exit__(kind, error, at)

    def read(self, header: LowRankHeader, start: int, outputs: range, inputs: range) -> LowRank:
        """An adapter's matrices for a layer, restricted to these outputs and inputs. Raises AdapterError."""
        try:
            a = self._file.get_slice(header.key("A"))[:, inputs.start : inputs.stop]
            b = self._file.get_slice(header.key("B"))[outputs.start : outputs.stop]
        except (SafetensorError, OSError) as error:
            raise self._unreadable(error) from error
        return LowRank(start, self._there(a), self._there(b), header.scaling)

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, self._dtype, copy=True).contiguous()

    def _unreadable(self, error: Exception) -> AdapterError:
        return AdapterError(f"{self._path} cannot be read: {error}")
