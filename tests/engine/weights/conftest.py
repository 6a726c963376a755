"""Helpers for tests of checkpoints: loading, copies that a test may break, and a device that counts the bytes read."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvrelay.engine.config.model import load_config
from kvrelay.engine.weights.checkpoint import load_weights
from kvrelay.engine.weights.parameters import ModelWeights
from tests.engine.conftest import SIZES, save_model

CPU = torch.device("cpu")


def load(directory: Path, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return load_weights(directory, load_config(directory), dtype, CPU, lambda done, total: None)


def edit(directory: Path, **tensors: torch.Tensor | None) -> None:
    """Change tensors of a checkpoint. None removes a tensor. ``__`` in a name stands for a dot."""
    path = directory / "model.safetensors"
    held = load_file(path)
    for name, tensor in tensors.items():
        held.pop(name.replace("__", "."), None)
        if tensor is not None:
            held[name.replace("__", ".")] = tensor
    save_file(held, path, metadata={"format": "pt"})  # transformers requires it


class Device:
    """Replaces safetensors' ``safe_open``. Tensors are new memory, which it counts."""

    def __init__(self) -> None:
        self.live_nbytes = self.peak_nbytes = self.largest_nbytes = 0
        self.read_nbytes = 0
        self.fails_at: str | None = None

    def open(self, path: Path, framework: str) -> DeviceFile:
        return DeviceFile(self, safe_open(path, framework))

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        held = torch.empty_like(tensor).copy_(tensor)
        self.read_nbytes += held.nbytes
        self.largest_nbytes = max(self.largest_nbytes, held.nbytes)
        self.live_nbytes += held.nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.live_nbytes)
        weakref.finalize(held, self._free, held.nbytes)
        return held

    def _free(self, nbytes: int) -> None:
        self.live_nbytes -= nbytes


class DeviceFile:
    """A file opened on a :class:`Device`."""

    def __init__(self, device: Device, file: Any) -> None:
        self._device = device
        self._file = file

    def __enter__(self) -> DeviceFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_tensor(self, name: str) -> torch.Tensor:
        if name == self._device.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.96 GiB")
        return self._device.hold(self._file.get_tensor(name))

    def get_slice(self, name: str) -> DeviceSlice:
        return DeviceSlice(self._device, self._file.get_slice(name))


class DeviceSlice:
    """A tensor of which parts are read."""

    def __init__(self, device: Device, whole: Any) -> None:
        self._device = device
        self._whole = whole

    def get_shape(self) -> list[int]:
        return list(self._whole.get_shape())

    def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor:
        return self._device.hold(self._whole[part])


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sharded")
    save_model(directory, transformers.LlamaConfig(**SIZES), shard_size="60KB")
    return directory


@pytest.fixture
def copy(llama: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of the plain Llama that a test may break."""
    return Path(shutil.copytree(llama[0], tmp_path / "copy"))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A counting device in the CPU's memory, which replaces the reader's ``safe_open``."""
    device = Device()
    monkeypatch.setattr("kvrelay.engine.weights.reader.safe_open", device.open)
    return device
