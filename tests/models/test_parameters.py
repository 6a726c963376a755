"""Checkpoints are read parameter by parameter: what stays of each, and what the host's memory holds meanwhile."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvrelay.engine.config.cut import Cut
from kvrelay.engine.models.hf.check import plain_logits
from kvrelay.engine.models.hf.loading import load_first_layers, load_model, load_outline, load_parameters
from kvrelay.engine.models.hf.outline import NoWeights
from kvrelay.engine.models.hf.ranks.cuts import find_cuts
from kvrelay.engine.models.hf.ranks.kinds import first_of_each_kind
from kvrelay.engine.weights.reader import CheckpointReader

from .test_quantised import FORMATS, stored
from .test_types import saved
from .tiny import VOCAB

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out
CPU = torch.device("cpu")


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors made in this mode while they live. A mapped file has none."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.nbytes = self.peak = 0
        self._mapped = {path.stat().st_size for path in directory.glob("*.safetensors")}
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            if isinstance(one, torch.Tensor) and not one.is_meta and one.untyped_storage().nbytes():
                self._hear(one.untyped_storage())
        return result

    def _hear(self, storage: torch.UntypedStorage) -> None:
        place, nbytes = storage.data_ptr(), storage.nbytes()
        if place in self._known or nbytes in self._mapped:
            return
        self._known.add(place)
        self.nbytes += nbytes
        self.peak = max(self.peak, self.nbytes)
        weakref.finalize(storage, self._forget, place, nbytes)

    def _forget(self, place: int, nbytes: int) -> None:
        self._known.discard(place)
        self.nbytes -= nbytes


def parts(directory: Path, dtype: torch.dtype, rank: int, num_ranks: int = 2) -> Any:
    """A rank's parameters."""
    outline = load_outline(directory, dtype)
    with NoWeights():
        cuts = find_cuts(outline, Cut(rank, num_ranks))
    return load_parameters(directory, dtype, CPU, keep=cuts.of)


@pytest.mark.parametrize("tied", [False, True])
def test_ranks_have_all_of_the_model_between_them(tied: bool, tmp_path: Path) -> None:
    """Of a float32 checkpoint in bf16, which transformers converts while it reads. Tied parameters stay one."""
    saved("starcoder2", tmp_path, tie_word_embeddings=tied)
    whole = load_model(tmp_path, torch.bfloat16, CPU).model
    ranks = [parts(tmp_path, torch.bfloat16, rank) for rank in (0, 1)]
    for model in ranks:
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert all(one.is_contiguous() and one.dtype == torch.bfloat16 for one in model.parameters())
        assert len({name for name, _ in model.named_parameters()}) == len(list(whole.parameters()))
    first, second = (dict(model.named_parameters()) for model in ranks)
    num_cut = 0
    for name, parameter in whole.named_parameters():
        both = [one for one in (first[name], second[name]) if len(one)]
        if first[name].shape != parameter.shape:
            dim = next(dim for dim in range(parameter.dim()) if first[name].shape[dim] != parameter.shape[dim])
            assert torch.equal(torch.cat(both, dim=dim), parameter)
            num_cut += 1
        else:
            assert all(torch.equal(one, parameter) for one in both)
    assert num_cut == 4 * 10  # six matrices of each layer, and the biases of four
    for name, buffer in whole.named_buffers():
        assert torch.equal(ranks[1].get_buffer(name), buffer)


def test_beside_its_parts_a_rank_holds_two_whole_parameters(tmp_path: Path) -> None:
    """A part that is a view would hold the whole of each."""
    saved("llama", tmp_path, num_hidden_layers=24)
    with Alive(tmp_path) as alive:
        model = parts(tmp_path, torch.bfloat16, rank=1)
    largest = 2 * VOCAB * 64  # the embedding, in bf16
    assert alive.peak <= sum(one.nbytes for one in model.parameters()) + 3 * largest
    assert 3 * largest < 24 * 64 * 32 * 2  # the other halves of one kind of matrix


def test_a_rank_reads_stored_weights_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("llama", tmp_path / "full", num_hidden_layers=12)
    directory = stored(tmp_path / "full", tmp_path / "stored", FORMATS["ct-fp8"])
    whole = load_model(directory, torch.float32, CPU).model
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    read = CheckpointReader.read

    def followed(reader: CheckpointReader, name: str, *given: Any) -> torch.Tensor:
        nonlocal most
        tensor = read(reader, name, *given)
        alive.append(weakref.ref(tensor.untyped_storage()))  # type: ignore[arg-type]
        most = max(most, sum(one() is not None for one in alive))
        return tensor

    monkeypatch.setattr(CheckpointReader, "read", followed)
    part = parts(directory, torch.float32, rank=1)
    assert len(alive) > 12 * 7
    assert most <= 3
    down = "model.layers.11.mlp.down_proj.weight"
    assert torch.equal(
        part.get_parameter(down), whole.get_parameter(down)[:, 32:]
    )  # 96 columns, cut at multiples of 32


def test_the_environment_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("llama", tmp_path)
    for value in (None, "0"):
        if value is not None:
            monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", value)
        load_parameters(tmp_path, torch.float32, CPU)
        assert os.environ.get("HF_DEACTIVATE_ASYNC_LOAD") == value


@pytest.mark.parametrize(
    ("model_type", "changes", "count"),
    [
        ("llama", {}, 1),
        ("gemma2", {}, 2),  # windows in every second layer
        ("qwen2", {"max_window_layers": 2}, 3),
        ("deepseek_v3", {"first_k_dense_replace": 2}, 3),
        ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}, 3),
        ("gemma3n_text", {"num_kv_shared_layers": 2}, 4),  # one of each window shares K/V of a layer before
        ("bamba", {}, 2),  # a recurrent layer, and one with attention
    ],
)
def test_the_first_layers_have_one_of_each_kind(
    model_type: str, changes: dict[str, Any], count: int, tmp_path: Path
) -> None:
    saved(model_type, tmp_path, **changes)
    first = first_of_each_kind(load_outline(tmp_path, torch.float32))
    assert first is not None
    assert first[1] == count


def test_the_first_layers_alone_are_those_of_the_whole_model(tmp_path: Path) -> None:
    """Also where inputs of all layers come from one embedding, which stays whole."""
    saved("gemma3n_text", tmp_path, num_kv_shared_layers=2)
    path, count = "model.layers", 3
    alone = load_first_layers(tmp_path, torch.float32, path, count)
    whole = load_model(tmp_path, torch.float32, CPU)
    assert len(alone.model.get_submodule(path)) == count  # type: ignore[arg-type]
    shape = whole.shape
    with whole.first_layers(path, count):
        for found, expected in zip(plain_logits(alone), plain_logits(whole), strict=True):
            assert torch.equal(found.logits, expected.logits)
        assert whole.shape.num_layers == 2
    assert whole.shape == shape
    assert len(whole.model.get_submodule(path)) == 4  # type: ignore[arg-type]
