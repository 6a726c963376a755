"""Ranks and stages read each element of a checkpoint that they have once, and no others."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.cut import Cut, cuts_of
from kvrelay.engine.config.model import ModelConfig, load_config
from kvrelay.engine.weights.checkpoint import load_weights
from tests.engine.conftest import SIZES, save_model

from .conftest import CPU, Device, edit, load
from .test_weights import MODELS, parameters


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_ranks", [2, 6])
def test_ranks_have_each_element_once_and_read_no_more(
    opened: Device, tmp_path: Path, model: str, num_ranks: int
) -> None:
    """The model has two K/V heads, so at six ranks three ranks have each of them."""
    save_model(tmp_path, MODELS[model])
    config = load_config(tmp_path)
    whole = parameters(load(tmp_path))
    cuts = [Cut(rank, num_ranks) for rank in range(num_ranks)]
    read_before, parts = opened.read_nbytes, []
    for cut in cuts:
        parts.append(parameters(load_weights(tmp_path, config, torch.float32, CPU, lambda done, total: None, cut=cut)))
        assert opened.read_nbytes - read_before <= sum(part.nbytes for part in parts[-1].values())
        read_before = opened.read_nbytes
    for name, tensor in whole.items():
        field = name.rpartition(".")[2]
        own = [part[name] for part in parts if name in part]
        if field in ("o_bias", "down_bias"):
            assert len(own) == 1, "a bias that is added once for each rank"
            assert torch.equal(own[0], tensor)
        elif "norm" in field:
            assert all(torch.equal(one, tensor) for one in own)
        elif field in ("embed", "lm_head"):
            assert torch.equal(torch.cat(own)[: len(tensor)], tensor)
            assert not torch.cat(own)[len(tensor) :].any()
        elif field in ("o", "down"):
            assert torch.equal(torch.cat(own, dim=1), tensor)
        else:
            assert_joined(field, config, cuts, own, tensor)


@pytest.mark.parametrize(
    "config",
    [
        transformers.MixtralConfig(**SIZES, num_local_experts=5, sliding_window=None),
        transformers.GptOssConfig(**SIZES, num_local_experts=5, attention_bias=True),
    ],
)
def test_ranks_with_whole_experts_have_each_once_and_read_no_others(
    opened: Device, tmp_path: Path, config: Any
) -> None:
    save_model(tmp_path, config)
    whole, parts = load(tmp_path), []
    for rank in range(2):
        read_before, cut = opened.read_nbytes, Cut(rank, 2, has_whole_experts=True)
        part = load_weights(tmp_path, load_config(tmp_path), torch.float32, CPU, lambda done, total: None, cut=cut)
        held = [*parameters(part).values(), *(one for layer in part.layers for one in tensors(layer.mlp))]
        assert opened.read_nbytes - read_before <= sum(tensor.nbytes for tensor in held)
        parts.append(part)
    for layer, *own in zip(whole.layers, *(part.layers for part in parts), strict=True):
        first, second = (tensors(one.mlp) for one in own)
        for expected, *joined in zip(tensors(layer.mlp), first, second, strict=True):
            assert torch.equal(torch.cat(joined), expected)


@pytest.mark.parametrize("model", MODELS)
def test_stages_have_their_layers_and_read_no_others(opened: Device, tmp_path: Path, model: str) -> None:
    save_model(tmp_path, MODELS[model])
    config = load_config(tmp_path)
    whole = load(tmp_path)
    for cut in cuts_of(1, 3):
        read_before = opened.read_nbytes
        part = load_weights(tmp_path, config, torch.float32, CPU, lambda done, total: None, cut=cut)
        assert opened.read_nbytes - read_before <= sum(one.nbytes for one in parameters(part).values())
        layers = cut.layers(config.num_layers)
        assert len(part.layers) == len(layers)
        expected = parameters(dataclasses.replace(whole, layers=[whole.layers[layer] for layer in layers]))
        own = parameters(part)
        has_embed, has_head = cut.is_first or (cut.is_last and config.has_tied_embeddings), cut.is_last
        assert [name in own for name in ("embed", "norm", "lm_head")] == [has_embed, has_head, has_head]
        assert all(torch.equal(tensor, expected[name]) for name, tensor in own.items())
        assert expected.keys() - own.keys() <= {"embed", "norm", "lm_head"}


def tensors(mlp: Any) -> list[torch.Tensor]:
    """All weights and biases of an MLP's experts."""
    experts = mlp.experts
    every = (experts.gate_up, experts.gate_up_bias, experts.down, experts.down_bias)
    return [tensor for tensor in every if tensor is not None]


def assert_joined(
    field: str, config: ModelConfig, cuts: list[Cut], own: list[torch.Tensor], whole: torch.Tensor
) -> None:
    """Check that each rank has its rows of the first joined part (q or gate), then of the next ones."""
    sizes = [config.q_size, config.kv_size, config.kv_size]
    parts = [[cut.config(config).q_size, *[cut.config(config).kv_size] * 2] for cut in cuts]
    if field.startswith("gate_up"):
        sizes = [config.intermediate_size] * 2
        parts = [[cut.config(config).intermediate_size] * 2 for cut in cuts]
    split = [tensor.split(part) for tensor, part in zip(own, parts, strict=True)]
    for place, expected_part in enumerate(whole.split(sizes)):
        rows = [one[place] for one in split]
        num_copies = sum(map(len, rows)) // len(expected_part)
        assert torch.equal(torch.cat(rows[::num_copies]), expected_part)
        assert all(torch.equal(one, rows[index // num_copies * num_copies]) for index, one in enumerate(rows))


def test_a_tensor_that_is_too_small_for_its_ranks_is_named(copy: Path) -> None:
    edit(copy, lm_head__weight=torch.ones(100, 48))
    with pytest.raises(ModelError, match=r"lm_head\.weight has shape \[100, 48\]; config\.json asks for \[199, 48\]"):
        load_weights(copy, load_config(copy), torch.float32, CPU, lambda done, total: None, cut=Cut(1, 2))
