"""Which model a request is for, where there are several."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.gateway.errors import ModelNotFoundError
from kvrelay.gateway.model import Model, ModelFiles, Models

from .players import good, stage


async def test_a_request_gets_the_model_that_it_names(model_directory: Path) -> None:
    async with stage(good) as first, stage(good) as second:
        files = ModelFiles.load(model_directory)
        small, large = Model("small", files, first.relay), Model("large", files, second.relay)
        models = Models([small, large])
        assert list(models) == [small, large]
        assert models.find("large") is models.named("large") is large
        assert [models.find(name) for name in (None, "tgi", "dummy", "small")] == [small] * 4
        for find in (models.find, models.named):
            with pytest.raises(ModelNotFoundError, match=r"'medium' is not served here; .* 'small', 'large'"):
                find("medium")
        with pytest.raises(ModelNotFoundError):
            models.named("tgi")
        assert models.find("tgi").pool is first.pool
        assert Models([small, Model("tgi", files, second.relay)]).find("tgi").pool is second.pool
