"""Every name of a released version still exists: settings, chart values, metrics, routes, and fields of the API.

``recorded/now.json`` has this tree's names: ``tools/pages.py`` writes it, and ``make check`` checks that it is current.
A release copies it to ``recorded/VERSION.json`` (CONTRIBUTING.md). That copy changes only when a name is removed as
docs/compatibility.md allows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent / "recorded"
RELEASED = {path.stem: json.loads(path.read_text()) for path in sorted(HERE.glob("[0-9]*.json"))}


def vanished(then: Any, now: Any, above: str = "") -> list[str]:
    """Names of ``then`` that ``now`` lacks, or that have another value there."""
    if isinstance(then, dict):
        pairs = [(name, value, f"{above}{name}: ") for name, value in then.items()]
        return [
            name for key, value, path in pairs for name in (vanished(value, now[key], path) if key in now else [path])
        ]
    if isinstance(then, list):
        return [f"{above}{name}" for name in then if name not in now]
    return [] if then == now else [f"{above}{then}, now {now}"]


@pytest.mark.parametrize("version", RELEASED)
def test_no_name_of_a_released_version_has_vanished(version: str) -> None:
    assert vanished(RELEASED[version], json.loads((HERE / "now.json").read_text())) == []


def test_what_vanished_is_named() -> None:
    then = {"settings": {"gateway": ["a", "b"]}, "metrics": {"m_total": "counter", "g": "gauge"}}
    now = {"settings": {"gateway": ["b", "c"]}, "metrics": {"g": "counter"}}
    assert vanished(then, now) == ["settings: gateway: a", "metrics: m_total: ", "metrics: g: gauge, now counter"]
