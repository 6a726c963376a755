"""A checkpoint's layer for drafting guesses the tokens that transformers' own layers give by the published formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.draft_layer import with_draft_layer
from kvrelay.engine.config.model import load_config
from kvrelay.engine.models.draft_head import HeadBesideModel
from kvrelay.engine.settings import Guessing
from kvrelay.engine.torch_engine import TorchEngine
from kvrelay.engine.weights.checkpoint import load_weights
from tests.draft_layers import ReferenceLayer, save_with_draft_layer
from tests.engine.conftest import load
from tests.engine.models.test_draft_head import Texts
from tests.engine.models.test_sparse_latent import INDEXER
from tests.engine.ranks.conftest import load_ranks
from tests.engine.weights.stored_models import FORMATS
from tests.engine.weights.storing import store

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out

HEADS = {"head_dim": 16, "num_key_value_heads": 2, "use_qk_norm": True, "attention_bias": True}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v3": ("deepseek_v3", {}),
    "v3 dense": ("deepseek_v3", {"is_dense": True}),
    "glm-4.7-flash": ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}),
    "glm-4.5": ("glm4_moe", HEADS),
    "v3.2": ("deepseek_v32", INDEXER),
    "glm-5": ("glm_moe_dsa", {**INDEXER, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}),
}


def engine_of(directory: Path) -> tuple[TorchEngine, HeadBesideModel]:
    engine = load(directory, dtype="float32", max_num_seqs=4, block_size=8, mtp_kv_bytes=2**22)
    assert engine.head is not None
    return engine, engine.head


@pytest.fixture(scope="module", params=VARIANTS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ReferenceLayer]:
    directory = tmp_path_factory.mktemp("model")
    model_type, fields = VARIANTS[request.param]
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    return directory, save_with_draft_layer(directory, model_type, **fields)


def test_drafts_are_those_of_the_published_formula(model: tuple[Path, ReferenceLayer]) -> None:
    """Prompts in chunks, right and wrong drafts, and texts of unequal length in one batch."""
    directory, reference = model
    texts = Texts(*engine_of(directory), seed=3)
    long, short = texts.begin(23), texts.begin(6)
    texts.step([long, short], 10)
    texts.step([long], 10)
    texts.step([long, short], 3)
    for num_right, num_wrong in ((0, 0), (2, 3), (0, 4), (1, 1)):
        texts.step([long, short], 1, num_wrong, num_right)
        expected = [reference.draft(text.token_ids, 0, 3) for text in (long, short)]
        assert texts.drafts([long, short], 3) == expected
        texts.step([short])


@pytest.mark.parametrize(("variant", "expert_parallel"), [("v3", False), ("v3", True), ("glm-4.5", False)])
def test_two_ranks_guess_together(tmp_path: Path, variant: str, expert_parallel: bool) -> None:
    model_type, fields = VARIANTS[variant]
    reference = save_with_draft_layer(tmp_path, model_type, **fields)
    guessing = Guessing(mtp_kv_bytes=2**22, taps=())
    sizes = {"num_blocks": 96, "block_size": 8}
    engine: Any = load_ranks(tmp_path, 2, guessing=guessing, dtype="float32", expert_parallel=expert_parallel, **sizes)
    try:
        texts = Texts(engine, engine.head, seed=3)
        long, short = texts.begin(12), texts.begin(5)
        texts.step([long, short], 12)
        for num_right, num_wrong in ((0, 2), (1, 1)):
            texts.step([long, short], 1, num_wrong, num_right)
            expected = [reference.draft(text.token_ids, 0, 3) for text in (long, short)]
            assert texts.drafts([long, short], 3) == expected
    finally:
        engine.close()


def test_a_layer_in_blocks_of_fp8(tmp_path: Path) -> None:
    """As DeepSeek publishes it: all matrices of the decoder layer are rounded, and ``eh_proj`` is not."""
    sizes = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    (tmp_path / "full").mkdir()
    save_with_draft_layer(tmp_path / "full", "deepseek_v3", **sizes)
    quantization, rounded = FORMATS["fp8-blocks"]
    held = {}

    def stored(module: str, weight: torch.Tensor) -> Any:
        if not module.endswith("_proj") or module.endswith("eh_proj"):
            return None
        held[module] = rounded(weight)
        return held[module]

    store(tmp_path / "full", tmp_path / "stored", quantization, stored)
    config = with_draft_layer(load_config(tmp_path / "stored"))
    weights = load_weights(tmp_path / "stored", config, torch.float32, torch.device("cpu"), lambda *_: None)
    assert weights.draft is not None
    parts = held["model.layers.4.self_attn.o_proj"]
    scales = parts["weight_scale_inv"].repeat_interleave(32, 0).repeat_interleave(32, 1)
    torch.testing.assert_close(weights.draft.layer.attention.o, parts["weight"].float() * scales)
    full = load_file(tmp_path / "full" / "model.safetensors")
    assert torch.equal(weights.draft.fuse, full["model.layers.4.eh_proj.weight"])


def test_workers_with_and_without_the_layer_hand_over_to_each_other(tmp_path: Path) -> None:
    save_with_draft_layer(tmp_path, "deepseek_v3")
    engine, _ = engine_of(tmp_path)
    assert engine.card == load(tmp_path, dtype="float32", max_num_seqs=4, block_size=8).card


def test_what_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    save_with_draft_layer(tmp_path, "deepseek_v3")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.4.hnorm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load(tmp_path, dtype="float32")
    with pytest.raises(ModelError, match=r"is model\.layers\.4\.hnorm\.weight; only --speculation mtp needs"):
        engine_of(tmp_path)


def test_a_model_without_such_a_layer_is_refused(tmp_path: Path) -> None:
    save_with_draft_layer(tmp_path, "deepseek_v3", num_nextn_predict_layers=2)
    with pytest.raises(ModelError, match="has 'num_nextn_predict_layers' 2, and one layer for drafting is needed"):
        engine_of(tmp_path)
