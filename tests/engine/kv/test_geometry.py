"""The geometry computed from a model equals that of its pool."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.common.kv_geometry import GroupKind
from kvrelay.engine.config.cut import cuts_of
from kvrelay.engine.config.model import KvSizes, ModelShape, StateTensor, WholeLayers, load_config, parse_config
from kvrelay.engine.kv.division import division_of
from kvrelay.engine.kv.fragments import taken
from kvrelay.engine.kv.geometry import LayerGroups, geometry_of
from kvrelay.engine.kv.pool import KvPool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_pool_s_blocks_have_the_bytes_of_the_geometry(llama: tuple[Path, Any], dtype: torch.dtype) -> None:
    config = load_config(llama[0])
    geometry = geometry_of(config, 8, dtype)
    (group,) = geometry.groups
    assert group.layers == tuple(range(config.num_layers))
    pool = KvPool(geometry, 3, torch.device("cpu"))
    assert (pool.tensor.dtype, pool.block_nbytes) == (dtype, geometry.block_nbytes)
    assert pool.tensor.shape == (3, config.num_layers, 2, config.num_kv_heads, 8, config.head_dim)


DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "qk_nope_head_dim": 128, "max_position_embeddings": 163_840, "norm_topk_prob": True, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_a_token_of_deepseek_v3_keeps_576_numbers_per_layer() -> None:
    (group,) = geometry_of(parse_config(DEEPSEEK_V3, "here"), 16, torch.bfloat16).groups
    assert (group.kind, group.num_kv_heads, group.key_size, group.value_size) == (GroupKind.LATENT, 1, 576, 0)
    assert group.token_nbytes == 61 * 576 * 2


def test_a_pool_of_latents_has_no_room_for_values() -> None:
    config = parse_config({**DEEPSEEK_V3, "num_hidden_layers": 4}, "here")
    geometry = geometry_of(config, 8, torch.bfloat16)
    pool = KvPool(geometry, 3, torch.device("cpu"))
    assert pool.tensor.shape == (3, 4, 1, 1, 8, 576)
    assert pool.block_nbytes == geometry.physical_nbytes == 8 * geometry.token_nbytes


MOSTLY_WINDOWS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "vocab_size": 199, "hidden_size": 48, "intermediate_size": 32,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
    "sliding_window": 9, "layer_types": ["full_attention", *["sliding_attention"] * 3] * 2, "max_position_embeddings": 128,
}  # fmt: skip


def test_a_stage_has_its_layers_of_each_group_and_the_groups_are_those_of_all() -> None:
    config = parse_config(MOSTLY_WINDOWS, "here")
    whole = LayerGroups.of_shape(config, 8)
    assert whole.layers == ((0, 4), (1, 5), (2, 6), (3, 7))
    own = [LayerGroups.of_shape(cut.config(config), 8) for cut in cuts_of(1, 3)]
    assert own[0].layers == ((0,), (1,), (2,), ())
    assert own[1].places == {4: (0, 0), 5: (1, 0), 3: (3, 0)}
    assert all(one.windows == whole.windows for one in own)
    for group, layers in enumerate(whole.layers):
        assert sorted(layer for one in own for layer in one.layers[group]) == list(layers)


def test_a_rank_with_whole_states_has_the_groups_of_the_whole_model() -> None:
    """Its attention keeps half as much of a token, so that fewer states would fit a block of its own."""
    sizes, state = KvSizes(4, 16, 16), StateTensor("recurrent", 0, (500,), "float32", 2000)
    whole = ModelShape(
        architecture="x", vocab_size=9, num_layers=1, num_q_heads=4, num_kv_heads=4, head_dim=16, max_position_embeddings=99,
        sliding_windows=(None,), layer_sizes=(sizes,), states=((state,),) * 4, dtype="float32", rope_text="",
    )  # fmt: skip
    alone = replace(whole, num_kv_heads=2, layer_sizes=(replace(sizes, num_kv_heads=2),))
    rank = replace(alone, whole_layers=WholeLayers((sizes,), whole.states))
    groups = [LayerGroups.of_shape(shape, 8) for shape in (whole, alone, rank)]
    assert groups[1].layers != groups[0].layers
    assert (groups[2].layers, groups[2].places) == (groups[0].layers, groups[0].places)
    assert groups[2].sizes == (rank.kv_sizes[0], *groups[0].sizes[1:])
    geometries = [geometry_of(shape, 8, torch.float32) for shape in (whole, rank)]
    division = division_of(geometries[0], geometries[1], {})
    assert division.whole == set(range(1, len(groups[0].layers)))
    for group in range(len(groups[0].layers)):
        (fragments,) = {sum(one.nbytes for one in taken(geometries[0], cut, group, division)) for cut in cuts_of(2, 1)}
        assert fragments == geometries[1].groups[group].token_nbytes * 8


def test_two_stages_keep_half_of_a_block_each_also_in_groups() -> None:
    config = parse_config(MOSTLY_WINDOWS, "here")
    whole = geometry_of(config, 8, torch.bfloat16)
    for cut in cuts_of(1, 2):
        assert geometry_of(cut.config(config), 8, torch.bfloat16).block_nbytes * 2 == whole.block_nbytes
