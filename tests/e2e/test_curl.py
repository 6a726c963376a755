"""The ``curl`` commands of the start banner and the README get an answer."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvrelay.launcher.local.deployment import LocalDeployment, ready_text

from .conftest import wait_until_idle

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl"),
]

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize("place", ["banner", "readme"])
def test_the_command_that_is_shown_gets_an_answer(place: str, deployment: LocalDeployment) -> None:
    shown = ready_text(deployment.url, "SmolLM2-135M-Instruct", has_keys=False)
    if place == "readme":
        shown = README.read_text().replace("http://127.0.0.1:8000", deployment.url)
    found = re.search(r"curl .*?\}'$", shown, flags=re.DOTALL | re.MULTILINE)
    assert found is not None
    done = subprocess.run(["sh", "-c", found[0]], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "Paris" in json.loads(done.stdout)["choices"][0]["message"]["content"]
    wait_until_idle(deployment)
