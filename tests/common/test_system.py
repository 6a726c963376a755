"""The limit on descriptors is raised as far as allowed, and never lowered; a container's cores are those it may use."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from kvrelay.common.system import available_cores, available_memory, raise_descriptor_limit

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


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("max 100000\n", 8),
        ("400000 100000\n", 4),
        ("150000 100000\n", 2),
        ("10000 100000\n", 1),
        ("3200000 100000\n", 8),
        (None, 8),  # not in a container
    ],
)
def test_a_limit_on_cpu_time_leaves_as_many_cores(
    limit: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    if limit is not None:
        (tmp_path / "cpu.max").write_text(limit)
    assert available_cores(tmp_path / "cpu.max") == expected


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        ("max\n", "7000\n", 4096 * 2**10),
        ("3000000\n", "1000000\n", 2_500_000),
        ("3000000\n", "3700000\n", 0),
        ("9000000\n", "1000000\n", 4096 * 2**10),
    ],
)
def test_memory_is_what_the_host_and_the_container_leave(limit: str, used: str, expected: int, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable:    4096 kB\n")
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text(used)
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 500000\nactive_file 3\n")
    assert available_memory(tmp_path / "meminfo", tmp_path) == expected


def test_memory_is_unknown_where_the_system_does_not_tell(tmp_path: Path) -> None:
    assert available_memory(tmp_path / "meminfo", tmp_path) is None
