"""``kvrelay calibrate-kv`` with a tiny model whose tokenizer knows some hundred words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from kvrelay.engine.kv_scales import FILE_NAME, load_kv_scales
from kvrelay.engine.model_config import load_config
from kvrelay.engine.weights import checkpoint_files
from kvrelay.launcher import cli
from tests.engine.conftest import SIZES, VOCAB, save_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    save_model(directory, transformers.LlamaConfig(**SIZES))
    backend = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(directory / "tokenizer.json"))
    return directory


def scales_of(model: Path) -> torch.Tensor:
    return load_kv_scales(model, checkpoint_files(model), load_config(model))


def test_the_built_in_text_gives_a_file_that_workers_find(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "chat_template.jinja").write_text("{% for message in messages %} w7 {{ message.content }}{% endfor %}")
    assert cli.run(["calibrate-kv", str(model), "--device", "cpu"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{model / FILE_NAME}\n"
    assert "keys and values of" in said.err
    assert "largest of keys: " in said.err
    scales = scales_of(model)
    assert scales.shape == (3, 2, 2)
    assert ((scales > 1e-4) & (scales < 1)).all()
    first = (model / FILE_NAME).read_bytes()
    (model / FILE_NAME).unlink()
    assert cli.run(["calibrate-kv", str(model), "--device", "cpu"]) == 0
    assert (model / FILE_NAME).read_bytes() == first, "the same at every run"


def test_prompts_of_ones_own_and_another_place(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    # The second is longer than the model allows, and is cut.
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("w1 w2 w3", "w4 " * 5000)))
    monkeypatch.chdir(tmp_path)
    assert cli.run(["calibrate-kv", str(model), "--prompts", str(prompts), "--output", "made.safetensors"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 'made.safetensors'}\n"
    assert "keys and values of 1027 tokens" in said.err
    assert not (model / FILE_NAME).exists()
    (tmp_path / "made.safetensors").rename(model / FILE_NAME)
    assert (scales_of(model) != 1).all()


def test_what_cannot_be_done_is_said_before_the_work(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.launcher.calibrate_kv.largest_kv", lambda *_: pytest.fail("it computes"))
    assert cli.run(["calibrate-kv", str(tmp_path / "none")]) == 1
    assert cli.run(["calibrate-kv", str(model), "--output", str(tmp_path / "none" / "x")]) == 2
    assert "--output: cannot write" in capsys.readouterr().err
    (tmp_path / "prompts.jsonl").write_text('{"text": "w1"}\n')
    assert cli.run(["calibrate-kv", str(model), "--prompts", str(tmp_path / "prompts.jsonl")]) == 2
    assert "line 1 of" in capsys.readouterr().err
    path = model / "model.safetensors"
    own = {f"model.layers.{layer}.self_attn.kv_scale": torch.tensor(0.5) for layer in range(3)}
    save_file({**load_file(path), **own}, path)
    assert cli.run(["calibrate-kv", str(model)]) == 1
    assert "has K/V scales of its own" in capsys.readouterr().err


@pytest.mark.parametrize("template", ["", "{% for message in messages %}{% endfor %}"])
def test_a_template_that_says_nothing_is_no_text(model: Path, template: str) -> None:
    (model / "chat_template.jinja").write_text(template)
    assert cli.run(["calibrate-kv", str(model), "--device", "cpu"]) == 0
    assert scales_of(model).shape == (3, 2, 2)


def test_without_the_memory_it_says_so(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    monkeypatch.setattr("kvrelay.engine.kv_calibration.KvPool", full)
    assert cli.run(["calibrate-kv", str(model), "--device", "cpu"]) == 1
    assert "do not fit the memory (tried to allocate 20 GiB): take shorter --prompts" in capsys.readouterr().err
