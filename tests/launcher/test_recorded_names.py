"""Names of a released version that this tree lacks are found. ``tools/pages.py --check`` compares those of all versions."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

PAGES = Path(__file__).parents[2] / "tools" / "pages.py"


def test_what_vanished_is_named() -> None:
    spec = importlib.util.spec_from_file_location("pages", PAGES)
    assert spec is not None
    assert spec.loader is not None
    pages: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    then = {"settings": {"gateway": ["a", "b"]}, "metrics": {"m_total": "counter", "g": "gauge"}}
    now = {"settings": {"gateway": ["b", "c"]}, "metrics": {"g": "counter"}}
    assert pages.vanished(then, then) == []
    assert pages.vanished(then, now) == ["settings: gateway: a", "metrics: m_total: ", "metrics: g: gauge, now counter"]
