"""The command-line detector, with a tokenizer of a thousand words."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from kvrelay.engine.sampling.watermark import is_green
from kvrelay.launcher import cli
from kvrelay.launcher.watermark import detect


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    backend = Tokenizer(models.WordLevel({f"w{index}": index for index in range(1000)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"vocab_size": 1000}))
    return directory


def text(num_tokens: int, gamma: float | None) -> tuple[str, list[int]]:
    """Random words. With a ``gamma``, each is the first of some candidates that is green after the word before it."""
    generator = np.random.default_rng(3)
    tokens = [1]
    for _ in range(num_tokens):
        candidates = generator.integers(0, 1000, 40, dtype=np.uint32)
        if gamma is not None:
            candidates = candidates[is_green(np.full_like(candidates, tokens[-1]), candidates, gamma)]
        tokens.append(int(candidates[0]))
    return " ".join(f"w{token}" for token in tokens), tokens


@pytest.mark.parametrize("gamma", [None, 0.5, 0.25])
def test_a_text_in_a_file_is_scored(
    gamma: float | None, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, tokens = text(200, gamma)
    (tmp_path / "answer.txt").write_text(words)
    assert (
        cli.run(["watermark", str(tmp_path / "answer.txt"), "--model", str(model), "--gamma", str(gamma or 0.5)]) == 0
    )
    found = detect(tokens, gamma or 0.5)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["scored", "tokens", str(found.num_scored)]
    assert lines[1].split()[2:] == [f"{found.green_fraction:.3f}", "(by", "chance", f"{gamma or 0.5:g})"]
    assert lines[2].split() == ["z", f"{found.z:.2f}"]
    assert lines[3].split() == ["p-value", f"{found.p_value:.3g}"]
    assert (found.z > 4) == (gamma is not None)


def test_a_text_may_be_piped_in(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVRELAY_MODEL", str(model))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"w1 w2 w1 w2"), encoding="utf-8"))
    assert cli.run(["watermark"]) == 0
    assert "scored tokens   2\n" in capsys.readouterr().out


def test_what_is_no_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["watermark", "--gamma", "1"]) == 2
    assert "--gamma" in capsys.readouterr().err
