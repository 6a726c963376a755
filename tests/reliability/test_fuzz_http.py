"""The fuzzing of the gateway's HTTP port, in short."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .fuzz_http import fuzz, fuzz_bytes, fuzz_openapi
from .served_gateway import Served, served_gateway

pytestmark = pytest.mark.timeout(120)
SEED = 3


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_gateway(tmp_path_factory.mktemp("gateway")) as served:
        yield served


def test_generated_requests_get_documented_answers(served: Served) -> None:
    told = fuzz(served, lambda: fuzz_openapi(served, SEED, 40))
    assert "times 200" in told  # some of them were served
    assert "times 400" in told


def test_garbage_leaves_the_gateway_well(served: Served) -> None:
    assert fuzz(served, lambda: fuzz_bytes(served, SEED, 600))
