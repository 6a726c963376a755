"""Clients of other projects, unmodified and each in its own environment (``make clients``), against the demo model."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvrelay.launcher.local.deployment import LocalDeployment

pytestmark = pytest.mark.timeout(300)

PROGRAMS = Path(__file__).parent / "programs"
ENVIRONMENTS = Path(__file__).parents[2] / ".clients"
MODEL = "SmolLM2-135M-Instruct"


def run(environment: str, program: str, deployment: LocalDeployment) -> dict[str, Any]:
    """Run a program in its environment and return its results."""
    python = ENVIRONMENTS / environment / "bin" / "python"
    assert python.exists(), "the clients' environments are missing: make clients"
    # Do not download the price list of other models.
    variables = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    done = subprocess.run(
        [python, PROGRAMS / program, deployment.url, MODEL],
        capture_output=True,
        text=True,
        timeout=280,
        env=variables,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def test_langchain_openai(deployment: LocalDeployment) -> None:
    results = run("langchain", "langchain_program.py", deployment)
    assert "Paris" in results["whole"]
    assert [results["streamed"], results["async"], results["responses"]] == [results["whole"]] * 3
    assert results["usage"]["output_tokens"] == results["streamed_usage"]["output_tokens"] > 0
    assert results["finish_reason"] == "stop"
    assert set(results["structured"]) == {"name", "is_capital"}
    assert results["calls"]
    for name, arguments in results["calls"]:
        assert (name, list(arguments)) == ("weather", ["city"])
    assert isinstance(results["after_calls"], str)
    assert "Paris" in results["text"]


def test_litellm(deployment: LocalDeployment) -> None:
    results = run("litellm", "litellm_program.py", deployment)
    assert "Paris" in results["whole"]
    assert results["streamed"] == results["async"] == results["whole"]
    assert results["completion_tokens"] > 0
    assert results["call"][0] == "weather"
    assert list(results["call"][1]) == ["city"]
    assert list(results["schema"]) == ["city"]
    assert "Paris" in results["text"]
    assert "temperature" in results["refused"]


def test_text_generation(deployment: LocalDeployment) -> None:
    results = run("tgi", "text_generation_program.py", deployment)
    assert "Paris" in results["whole"]
    same = [results["streamed"], results["last"], results["async"], results["async_streamed"]]
    assert same == [results["whole"]] * 4
    assert "".join(results["tokens"]) == results["whole"]
    assert results["finish_reason"] == "length"
    assert all(logprob <= 0 for logprob in results["logprobs"])
    assert "".join(results["prefill"]) == "The capital of France is"
    assert all(number >= 2 for number in results["num_top_tokens"])
    assert results["best_of"] == 1
    assert re.fullmatch("[0-9]{3}-[0-9]{2}", results["grammar"])
    assert results["chat"]
    assert "1000000" in results["refused"]
