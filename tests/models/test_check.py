"""The check at load: what rounding may change in a mixture, and what it may not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvrelay.common.errors import ModelError
from kvrelay.engine.models.hf import check
from kvrelay.engine.models.hf.check import Plain, check_model, plain_logits
from kvrelay.engine.models.hf.loading import load_model
from kvrelay.engine.models.hf.model import TransformersModel

from .played_ranks import PlayedCollectives
from .test_types import saved

BF16 = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[TransformersModel, list[Plain]]:
    """A mixture in bf16 whose routers have near ties, and what the check compares it with."""
    directory = tmp_path_factory.mktemp("mixture")
    saved("qwen3_moe", directory)
    model = load_model(directory, BF16, torch.device("cpu"))
    for name, parameter in model.model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            with torch.no_grad():
                parameter[1] = parameter[0] * (1 + 2**-8)
    return model, plain_logits(model)


@pytest.mark.parametrize("at_a_tie", [True, False])
def test_logits_may_be_off_where_a_router_has_a_near_tie(
    mixture: tuple[TransformersModel, list[Plain]], at_a_tie: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same distance at a position that rounding does not move is a wrong forward pass."""
    model, plain = mixture
    moved, found = plain[0].moved, [one.logits.clone() for one in plain]
    assert moved.max() > 0.2
    assert moved.min() < check.TOLERANCES[BF16] / 3
    at = int(moved.argmax() if at_a_tie else moved.argmin())
    found[0][at] *= 1.5
    while (found[0] - plain[0].logits).norm() < 0.07 * plain[0].logits.norm():  # beyond the tolerance as a whole
        found[0][at] *= 1.1
    monkeypatch.setattr(check, "paged_logits", lambda *_: found)

    def compared() -> float:
        unused: Any = None
        return check_model(model, plain, unused, BF16)

    if at_a_tie:
        assert compared() >= 0.07
    else:
        with pytest.raises(
            ModelError, match=r"logits differ by 0\.\d+ of their size, more than 0\.06 \(.*--dtype float32"
        ):
            compared()


def test_rounding_that_moves_most_positions_excuses_nothing(
    mixture: tuple[TransformersModel, list[Plain]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mixture of many layers may be so; a layer without attention was off by less than rounding then."""
    model, plain = mixture
    plain = [replace(one, moved=torch.full_like(one.moved, 0.35)) for one in plain]
    monkeypatch.setattr(check, "paged_logits", lambda *_: [one.logits * 1.25 for one in plain])
    unused: Any = None
    with pytest.raises(ModelError, match=r"moves logits by up to 0\.35: --dtype float32 shows whether"):
        check_model(model, plain, unused, BF16)


def test_another_number_format_is_no_way_out_where_rounding_moves_little(
    mixture: tuple[TransformersModel, list[Plain]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = mixture
    plain = [replace(one, moved=one.moved.clamp_max(0.05)) for one in plain]
    monkeypatch.setattr(check, "paged_logits", lambda *_: [one.logits * 1.25 for one in plain])
    unused: Any = None
    with pytest.raises(ModelError, match=r"logits differ by 0\.25 of their size, more than 0\.06; it is not served"):
        check_model(model, plain, unused, BF16)


def test_a_rank_that_waited_for_another_does_not_blame_the_model_alone(
    mixture: tuple[TransformersModel, list[Plain]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its collective fails if the other one has refused the model, or has ended."""
    model, plain = mixture

    def interrupted(*_: Any) -> list[torch.Tensor]:
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(check, "paged_logits", interrupted)
    unused: Any = None
    with pytest.raises(ModelError, match=r"does not run .*, or another rank failed first \(RuntimeError: connection"):
        check_model(model, plain, unused, BF16, ranks=PlayedCollectives(unused, 1))
