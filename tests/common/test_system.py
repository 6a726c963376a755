"""The limit on descriptors is raised as far as allowed, and never lowered."""

from __future__ import annotations

import resource

import pytest

from kvrelay.common.system import raise_descriptor_limit

ENDLESS = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (1024, 4096, 4096),
        (1024, 2**20, 65_536),
        (1024, ENDLESS, 65_536),
        (4096, 4096, 4096),
        (2**20, 2**20, 2**20),
        (ENDLESS, ENDLESS, 65_536),
    ],
)
def test_the_limit_is_what_it_may_be(soft: int, hard: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    assert raise_descriptor_limit() == expected
    assert set_to == ([(expected, hard)] if soft == 1024 else [])
