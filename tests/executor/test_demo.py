"""The demo model: in this process, at an address, and in every example of docs/executor.md."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvrelay.executor import LLM, InvalidRequestError, Request, SamplingParams, StructuredOutputsParams
from kvrelay.launcher.local import LocalDeployment
from kvrelay.launcher.models import resolve_model
from kvrelay.launcher.settings import LocalSettings

from .deployments import running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

DOCUMENT = Path(__file__).parents[2] / "docs" / "executor.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture(scope="module")
def deployment() -> Iterator[LocalDeployment]:
    """Every prompt takes the relay."""
    settings = LocalSettings(
        port=0, device="cpu", dtype="float32", threads=1, local_prefill_max_tokens=0, kv_memory_mb=256
    )
    with running(settings, resolve_model("demo")) as up:
        yield up


def test_here_and_there_the_model_says_the_same(deployment: LocalDeployment) -> None:
    """Alone, in a batch, in this process, over the hand-off: tokens, texts and ends are equal, log probabilities nearly."""
    before = set(threading.enumerate())
    requests = [
        Request("The capital of France is", SamplingParams(temperature=0, max_tokens=12, logprobs=2)),
        Request("Once upon a time", SamplingParams(seed=7, max_tokens=12, logprobs=0)),
        Request("Once upon a time", SamplingParams(seed=7, n=3, max_tokens=12, top_p=0.9, top_k=40)),
        Request("One, two, three", SamplingParams(temperature=0, max_tokens=40, stop=[" nine"], prompt_logprobs=1)),
        Request([260, 1277, 282], SamplingParams(seed=1, max_tokens=9, repetition_penalty=1.3, min_p=0.05)),
    ]
    with (
        LLM("demo", device="cpu", dtype="float32", threads=1, kv_memory_mb=256) as here,
        LLM(address=deployment.url) as there,
    ):
        told = [llm.generate(requests) for llm in (here, there)]
        alone = [here.submit(request).result(60) for request in requests]
        (chat,) = here.chat(
            [{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0)
        )
        assert "Paris" in chat.outputs[0].text
    for local, remote, again in zip(*told, alone, strict=True):
        assert local.prompt_token_ids == remote.prompt_token_ids
        for here_told, there_told in zip(local.prompt_logprobs or [], remote.prompt_logprobs or [], strict=True):
            assert list(here_told or {}) == list(there_told or {})
            for token_id, one in (here_told or {}).items():
                assert (there_told or {})[token_id].logprob == pytest.approx(one.logprob, abs=1e-3)
        for other in (remote, again):
            for one, same in zip(local.outputs, other.outputs, strict=True):
                assert (same.text, same.token_ids) == (one.text, one.token_ids)
                assert (same.finish_reason, same.stop_reason) == (one.finish_reason, one.stop_reason)
                assert same.cumulative_logprob == pytest.approx(one.cumulative_logprob, abs=1e-3)
    assert told[0][3].outputs[0].stop_reason == " nine"
    assert not set(threading.enumerate()) - before


def test_guides_and_what_they_leave(deployment: LocalDeployment) -> None:
    """The same guided text both ways; the process that compiles guides ends with the executor."""
    pattern = StructuredOutputsParams(regex=r"(Paris|Rome), [0-9]{2}!")
    request = Request("The capital of France is", SamplingParams(seed=1, max_tokens=20, structured_outputs=pattern))
    wrong = SamplingParams(structured_outputs=StructuredOutputsParams(json='{"type": 5}'))
    processes = psutil.Process().children()
    with (
        LLM("demo", device="cpu", dtype="float32", threads=1, kv_memory_mb=256) as here,
        LLM(address=deployment.url) as there,
    ):
        texts = [llm.submit(request).result(90).outputs[0].text for llm in (here, there)]
        assert texts[0] == texts[1]
        assert re.fullmatch(r"(Paris|Rome), [0-9]{2}!", texts[0])
        for llm in (here, there):
            with pytest.raises(
                InvalidRequestError, match=r"^structured_outputs\.json cannot be followed: Type should be a string"
            ):
                llm.submit("x", wrong).result(90)
    assert psutil.Process().children() == processes


@pytest.mark.parametrize("example", range(len(EXAMPLES)))
def test_the_documents_examples_run(deployment: LocalDeployment, tmp_path: Path, example: int) -> None:
    program = EXAMPLES[example].replace("http://127.0.0.1:8000", deployment.url)
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_an_interpreter_that_exits_within_a_step(tmp_path: Path) -> None:
    """Torch computes while the interpreter goes: nothing hangs, nothing aborts, no file stays."""
    program = (
        "from kvrelay.executor import LLM, SamplingParams\n"
        "llm = LLM('demo', device='cpu', threads=1, kv_memory_mb=256)\n"
        "results = [llm.submit('Hello', SamplingParams(max_tokens=1000, ignore_eos=True), stream=True) for _ in range(4)]\n"
        "next(output for output in results[0] if output.outputs[0].token_ids)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}\n{program}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []
