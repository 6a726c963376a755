"""The demo model gives the same answers in this process and over HTTP, and the examples of two documents run with it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from openai import OpenAI

from kvrelay.executor import LLM, InvalidRequestError, Request, SamplingParams, StructuredOutputsParams
from kvrelay.launcher.local.deployment import LocalDeployment
from kvrelay.launcher.models import resolve_model
from kvrelay.launcher.settings import LocalSettings

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

DOCUMENTS = [Path(__file__).parents[2] / "docs" / name for name in ("executor.md", "speculation.md")]
EXAMPLES = [
    example
    for document in DOCUMENTS
    for example in re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), flags=re.DOTALL)
]
OPTIONS = {"device": "cpu", "dtype": "float32", "threads": 1, "kv_memory_mb": 256}


def test_here_and_over_http_the_model_says_the_same() -> None:
    """Texts and finish reasons are equal in a batch, alone, and over HTTP with a hand-off. No thread or process is left."""
    before, processes = set(threading.enumerate()), psutil.Process().children()
    pattern = r"(Paris|Rome), [0-9]{2}!"
    requests = [
        Request("The capital of France is", SamplingParams(temperature=0, max_tokens=12)),
        Request("Once upon a time", SamplingParams(seed=7, n=3, max_tokens=12, top_p=0.9, top_k=40)),
        Request("One, two, three", SamplingParams(temperature=0, max_tokens=40, stop=[" nine"])),
        Request([260, 1277, 282], SamplingParams(seed=1, max_tokens=9, repetition_penalty=1.3, min_p=0.05)),
        Request(
            "The capital of France is",
            SamplingParams(seed=1, max_tokens=20, structured_outputs=StructuredOutputsParams(regex=pattern)),
        ),
    ]
    wrong = SamplingParams(structured_outputs=StructuredOutputsParams(json='{"type": 5}'))
    with LLM("demo", **OPTIONS) as here:
        told = here.generate(requests)
        alone = [here.submit(request).result(60) for request in requests]
        with pytest.raises(InvalidRequestError, match=r"^structured_outputs\.json cannot be followed"):
            here.submit("x", wrong).result(90)
    assert not set(threading.enumerate()) - before
    assert psutil.Process().children() == processes
    assert told[2].outputs[0].stop_reason == " nine"
    assert re.fullmatch(pattern, told[4].outputs[0].text)
    settings = LocalSettings.of(port=0, local_prefill="fallback", **OPTIONS)
    with LocalDeployment.from_settings(settings, resolve_model("demo")) as deployment:
        deployment.wait_ready(timeout_s=180)
        client = OpenAI(base_url=f"{deployment.url}/v1", api_key="none")
        for request, batched, again in zip(requests, told, alone, strict=True):
            body = request.body(request.prompt, stream=False)  # type: ignore[arg-type]
            answer = client.completions.create(
                model="SmolLM2-135M-Instruct", prompt=body.pop("prompt"), extra_body=body
            )
            texts = [(choice.text, choice.finish_reason) for choice in answer.choices]
            for output in (batched, again):
                assert [(one.text, one.finish_reason) for one in output.outputs] == texts


@pytest.mark.parametrize("example", range(len(EXAMPLES)))
def test_the_documents_examples_run(example: int) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", EXAMPLES[example]],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_an_interpreter_that_exits_within_a_step(tmp_path: Path) -> None:
    """The interpreter exits while torch computes. It does not hang or abort, and leaves no file."""
    program = (
        "from kvrelay.executor import LLM, SamplingParams\n"
        "llm = LLM('demo', device='cpu', threads=1, kv_memory_mb=256)\n"
        "results = [llm.submit('Hello', SamplingParams(max_tokens=1000, ignore_eos=True), stream=True) for _ in range(4)]\n"
        "next(output for output in results[0] if output.outputs[0].token_ids)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}\n{program}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []
