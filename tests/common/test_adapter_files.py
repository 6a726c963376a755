"""Reading PEFT's adapter files: supported settings are read, and settings that are not supported are refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrelay.common.adapter_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterAbsentError,
    AdapterError,
    AdapterFiles,
    adapter_digest,
    adapter_directory,
    require_digest,
)
from tests.adapters import write_adapter

SHAPES = {"model.layers.0.self_attn.q_proj": (12, 8), "model.layers.1.mlp.down_proj": (8, 20)}


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "formal", SHAPES)
    return tmp_path / "formal"


def change_config(directory: Path, **settings: Any) -> None:
    path = directory / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(directory / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, directory / WEIGHTS_FILE)


def test_layers_have_their_ranks_and_scalings(tmp_path: Path) -> None:
    """A pattern matches the end of a module's name, as in PEFT."""
    write_adapter(tmp_path / "a", SHAPES, rank=4, alpha=8, ranks={"mlp.down_proj": 2}, alpha_pattern={"q_proj": 1})
    files = AdapterFiles.read(tmp_path / "a")
    q, down = files.layers
    assert (q.module, q.rank, q.num_inputs, q.num_outputs, q.scaling) == (*list(SHAPES)[:1], 4, 8, 12, 1 / 4)
    assert (down.module, down.rank, down.num_inputs, down.num_outputs, down.scaling) == (*list(SHAPES)[1:], 2, 20, 8, 4)
    assert files.num_parameters == 4 * (8 + 12) + 2 * (20 + 8)


def test_rslora_divides_by_the_root_of_the_rank(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", SHAPES, rank=4, alpha=8, use_rslora=True)
    assert {layer.scaling for layer in AdapterFiles.read(tmp_path / "a").layers} == {8 / math.sqrt(4)}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"of_the_future": True}, "of_the_future"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"rank_pattern": {"q_proj": 3}}, "rank 4"),
        ({"rank_pattern": {"(": 3}}, "rank_pattern"),
        ({"rank_pattern": {"x{99999999999}": 3}}, "rank_pattern"),
        ({"rank_pattern": {"(" * 5000 + ")" * 5000: 3}}, "rank_pattern"),
        ({"lora_alpha": 10**400}, "cannot be read"),
    ],
)
def test_other_computations_are_refused(adapter: Path, settings: dict[str, Any], named: str) -> None:
    change_config(adapter, **settings)
    with pytest.raises(AdapterError, match=named) as raised:
        AdapterFiles.read(adapter)
    assert str(adapter) in str(raised.value)


def test_a_setting_of_the_future_may_say_that_it_is_not_used(adapter: Path) -> None:
    change_config(adapter, of_the_future=False, another=None, third={})
    assert len(AdapterFiles.read(adapter).layers) == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda it: it.update({"base_model.model.lm_head.weight": torch.zeros(2, 2)}), "lm_head"),
        (lambda it: it.update({"base_model.model.x.lora_magnitude_vector": torch.zeros(2)}), "lora_magnitude_vector"),
        (lambda it: it.update({"base_model.model.x.lora_A.weight": torch.zeros(2, 2)}), "x has no lora_B"),
        (lambda it: it.pop("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"), "has no lora_A"),
        (lambda it: it.clear(), "no tensors"),
        (lambda it: it.update({name: tensor.to(torch.int8) for name, tensor in it.items()}), "I8"),
    ],
)
def test_other_tensors_are_refused(adapter: Path, change: Callable[[dict[str, Any]], Any], named: str) -> None:
    change_tensors(adapter, change)
    with pytest.raises(AdapterError, match=named) as raised:
        AdapterFiles.read(adapter)
    assert WEIGHTS_FILE in str(raised.value)


def test_ranks_are_bounded(tmp_path: Path) -> None:
    write_adapter(tmp_path / "most", SHAPES, rank=256)
    assert len(AdapterFiles.read(tmp_path / "most").layers) == 2
    write_adapter(tmp_path / "more", SHAPES, rank=257)
    with pytest.raises(AdapterError, match="1 to 256"):
        AdapterFiles.read(tmp_path / "more")


@pytest.mark.parametrize("kept", [0, 4, 9, 200, -1])
def test_a_truncated_file_is_refused(adapter: Path, kept: int) -> None:
    path = adapter / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(AdapterError, match=f"{WEIGHTS_FILE}.*(truncated|fetch it again)"):
        AdapterFiles.read(adapter)


def test_a_header_that_no_shapes_can_be_read_from_is_refused(adapter: Path) -> None:
    for header in (b'{"x": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}', b"[" * 500_000):
        (adapter / WEIGHTS_FILE).write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(AdapterError, match=WEIGHTS_FILE):
            AdapterFiles.read(adapter)


def test_a_config_that_is_no_json_object_is_refused(adapter: Path) -> None:
    for text in ("[]", "{", "", "[" * 500_000):
        (adapter / CONFIG_FILE).write_text(text)
        with pytest.raises(AdapterError, match=CONFIG_FILE):
            AdapterFiles.read(adapter)


def test_names_and_links_do_not_lead_outside(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_adapter(root / "formal", SHAPES)
    write_adapter(tmp_path / "elsewhere", SHAPES)
    assert adapter_directory(root, "formal") == root / "formal"
    for name in ("../elsewhere", "..", "", ".hidden", "a/b", "/etc", "x" * 129):
        with pytest.raises(AdapterError, match="no name of an adapter"):
            adapter_directory(root, name)
    with pytest.raises(AdapterError, match="is missing"):
        adapter_directory(root, "absent")
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "half").mkdir()
    (root / "half" / CONFIG_FILE).write_text("{}")
    (root / "half" / WEIGHTS_FILE).symlink_to(tmp_path / "elsewhere" / WEIGHTS_FILE)
    for name in ("linked", "half"):
        with pytest.raises(AdapterError, match="leads outside"):
            adapter_directory(root, name)
    (root / "inside").symlink_to(root / "formal")  # Kubernetes' volumes use such links
    assert adapter_directory(root, "inside").name == "inside"


def test_the_digest_is_of_the_contents(tmp_path: Path) -> None:
    first = write_adapter(tmp_path / "a", SHAPES)
    same = write_adapter(tmp_path / "b", SHAPES)
    assert first.digest == same.digest
    assert write_adapter(tmp_path / "c", SHAPES, seed=1).digest != first.digest
    assert write_adapter(tmp_path / "d", SHAPES, alpha=9).digest != first.digest
    path = tmp_path / "a" / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    assert adapter_digest(tmp_path / "a") != first.digest
    require_digest(tmp_path / "b", first.digest)
    with pytest.raises(AdapterAbsentError, match="its files were changed, or are not all there yet"):
        require_digest(tmp_path / "a", first.digest)
    path.unlink()
    with pytest.raises(AdapterAbsentError, match=f"{WEIGHTS_FILE} is missing"):
        require_digest(tmp_path / "a", first.digest)
