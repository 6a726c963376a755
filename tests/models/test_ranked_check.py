"""The check at load of ranks, none of which has the whole model: what passes, what is refused, what it takes instead."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.common.errors import ModelError
from kvrelay.engine.models.hf import ranked
from kvrelay.engine.models.hf.ranks.cuts import Cuts
from tests.engine.ranks.conftest import load_ranks

from .test_quantised import FORMATS, ours, stored
from .test_types import engine_of, saved

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out


def two_ranks(directory: Path) -> Any:
    """The caller closes it."""
    return load_ranks(directory, 2, backend="transformers", dtype="float32")


@pytest.mark.parametrize("layer", ["self_attn.o_proj", "mlp.up_proj"])
def test_a_plan_that_is_wrong_for_a_kind_of_layers_is_refused(
    layer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank takes the part of the second. The layers that are not checked are right."""
    saved("gemma2", tmp_path)
    find = ranked.find_cuts

    def wrong(*given: Any) -> Cuts:
        cuts, name = find(*given), f"model.layers.1.{layer}"
        one, weight = cuts.linears[name], cuts.parameters[f"{name}.weight"]
        other = (range(one.size, 2 * one.size),)
        return replace(
            cuts,
            linears=cuts.linears | {name: replace(one, ranges=other)},
            parameters=cuts.parameters | {f"{name}.weight": replace(weight, ranges=other)},
        )

    monkeypatch.setattr(ranked, "find_cuts", wrong)
    with pytest.raises(ModelError, match="over paged K/V is not what transformers computes"):
        two_ranks(tmp_path).close()


def test_layers_that_do_not_run_alone_are_checked_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As the first rank says; the others find that a few would do."""
    saved("llama", tmp_path)
    monkeypatch.setattr(ranked, "first_of_each_kind", lambda _: None)
    lengths: list[int] = []
    plain = ranked.plain_logits
    monkeypatch.setattr(
        ranked, "plain_logits", lambda model: lengths.append(len(model.model.model.layers)) or plain(model)
    )
    with caplog.at_level(logging.WARNING):
        engine = two_ranks(tmp_path)
    assert lengths == [4]
    assert "goes through the host's memory as a whole" in caplog.text
    try:
        torch.testing.assert_close(ours(engine), ours(engine_of(tmp_path)), rtol=0, atol=2e-4)
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["awq", pytest.param("fp8-blocks", marks=pytest.mark.full)])
def test_two_ranks_serve_a_quantised_checkpoint(name: str, tmp_path: Path) -> None:
    saved("llama", tmp_path / "full")
    directory = stored(tmp_path / "full", tmp_path / "stored", FORMATS[name])
    engine = two_ranks(directory)
    try:
        torch.testing.assert_close(ours(engine), ours(engine_of(directory)), rtol=0, atol=2e-4)
    finally:
        engine.close()
