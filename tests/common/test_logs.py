"""What a process logs: warnings that may come in a flood once a second, and nothing that says nothing."""

from __future__ import annotations

import logging
import subprocess
import sys

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


_DEBUG = """
import asyncio, logging
from kvrelay.common.logs import configure_logs

async def work():
    logging.getLogger("kvrelay.work").debug("a step")

configure_logs("debug", "text")
asyncio.run(work())
"""
_SIZE = """
import base64, io
from PIL import Image
from kvrelay.common.logs import configure_logs
from kvrelay.gateway.chat.images import Gallery

exif, file = Image.Exif(), io.BytesIO()
exif[0x013B] = "a secret artist"
Image.new("L", (2, 2)).save(file, "JPEG", exif=exif)
configure_logs("debug", "text")
url = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
Gallery().add({"type": "input_image", "image_url": url}, "input")
"""


def test_all_that_is_logged_at_debug_is_our_own() -> None:
    ran = subprocess.run([sys.executable, "-P", "-c", _DEBUG], capture_output=True, text=True, timeout=60, check=True)
    assert [line.partition(" ")[2] for line in ran.stderr.splitlines()] == ["DEBUG   a step"]


def test_nothing_of_a_clients_image_is_logged_at_debug() -> None:
    ran = subprocess.run([sys.executable, "-P", "-c", _SIZE], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stderr == ""
