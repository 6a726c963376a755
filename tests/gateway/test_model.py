"""Which model a request is for, where there are several."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.gateway.errors import ModelNotFoundError
from kvrelay.gateway.model import Model, ModelFiles, Models
from kvrelay.gateway.model_names import Alias

from .players import good, stage


async def test_a_request_gets_the_model_that_it_names(model_directory: Path) -> None:
    async with stage(good) as first, stage(good) as second:
        files = ModelFiles.load(model_directory)
        small, large = Model("small", files, first.relay), Model("large", files, second.relay)
        models = Models([small, large])
        assert list(models) == [small, large]
        assert models.find("large") is large
        assert [models.find(name) for name in (None, "tgi", "dummy", "small")] == [small] * 4
        for find in (models.find, models.shares):
            with pytest.raises(ModelNotFoundError, match=r"'medium' is not served here; .* 'small', 'large'"):
                find("medium")
        with pytest.raises(ModelNotFoundError):
            models.shares("tgi")
        assert models.find("tgi").pool is first.pool
        assert Models([small, Model("tgi", files, second.relay)]).find("tgi").pool is second.pool


async def test_an_alias_stands_for_a_model_or_for_shares_of_several(model_directory: Path) -> None:
    async with stage(good) as on:
        files = ModelFiles.load(model_directory)
        small, large = Model("small", files, on.relay), Model("large", files, on.relay)
        aliases = [Alias("chat", (("large", 1.0),)), Alias("canary", (("small", 3.0), ("large", 1.0)))]
        models = Models([small, large], aliases=aliases, default="canary")
        assert models.names == ["small", "large", "chat", "canary"]
        assert models.find("chat", lambda: pytest.fail("nothing is to be decided")) is large
        chosen = {f"user {number}": models.find(None, f"user {number}".__str__) for number in range(40)}
        assert set(chosen.values()) == {small, large}
        assert all(models.find("canary", name.__str__) is model for name, model in chosen.items())
        assert models.shares("canary") == [(small, 3.0), (large, 1.0)]
