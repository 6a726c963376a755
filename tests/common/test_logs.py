"""Warnings that may come in a flood are logged once a second."""

from __future__ import annotations

import logging

import pytest

from kvrelay.common.logs import RareWarnings


def test_a_flood_is_one_line_a_second(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 100.0
    warnings = RareWarnings(logging.getLogger("flood"), lambda: now_s)
    for _ in range(1000):
        warnings.warn("a bad frame", "bad_header")
    now_s += 1.0
    warnings.warn("another one", "bad_size")
    now_s += 1.0
    warnings.warn("a third", "bad_size")
    assert caplog.messages == ["a bad frame", "another one (and 999 more since the last such line)", "a third"]
    assert [record.__dict__["cause"] for record in caplog.records] == ["bad_header", "bad_size", "bad_size"]
