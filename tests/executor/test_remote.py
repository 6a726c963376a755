"""One class, two ways: a model in this process and a cluster's address give the same outputs, errors and numbers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.common.errors import SettingsError
from kvrelay.executor import (
    LLM,
    ApiError,
    Chat,
    GatewayUnreachableError,
    InvalidRequestError,
    Prompt,
    Request,
    RequestOutput,
    SamplingParams,
    ShutDownError,
)
from kvrelay.executor.completions import CompletionReader, events
from kvrelay.executor.errors import told_error
from kvrelay.executor.outputs import Logprob
from kvrelay.executor.progress import Progress
from kvrelay.gateway import errors as api
from kvrelay.launcher.local import LocalDeployment
from kvrelay.launcher.settings import LocalSettings

from .deployments import running

pytestmark = pytest.mark.timeout(120)

CHAT = Chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who jumps over the dog?"}])


@pytest.fixture(scope="module")
def deployment(tiny_model: Path) -> Iterator[LocalDeployment]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVRELAY_FAKE_STEP_MS", "1")
        with running(LocalSettings(port=0, engine="fake", local_prefill_max_tokens=0), tiny_model) as up:
            yield up


@pytest.fixture(scope="module")
def remote(deployment: LocalDeployment) -> Iterator[LLM]:
    with LLM(address=deployment.url) as llm:
        yield llm


@pytest.fixture(scope="module")
def local(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), engine="fake", fake_step_ms=1) as llm:
        yield llm


def same(output: RequestOutput) -> RequestOutput:
    """What does not depend on who was asked, and when."""
    return replace(output, request_id="", num_cached_tokens=0)


CASES: list[tuple[Prompt, SamplingParams]] = [
    ("the quick brown fox", SamplingParams(temperature=0, max_tokens=20)),
    ("the quick brown fox", SamplingParams(seed=7, max_tokens=12, logprobs=3)),
    ([5, 9, 300, 17], SamplingParams(seed=-1, max_tokens=5, logprobs=0, prompt_logprobs=2, ignore_eos=True)),
    (list(range(1, 200)), SamplingParams(seed=3, n=3, max_tokens=9, logprobs=1)),
    ("a dog", SamplingParams(seed=3, n=2, best_of=4, max_tokens=6)),
    ("a dog", SamplingParams(seed=3, n=2, best_of=4, max_tokens=6, logprobs=2, prompt_logprobs=0)),
    ("a dog", SamplingParams(use_beam_search=True, beam_width=3, n=2, max_tokens=6, temperature=0)),
    ("jumps over", SamplingParams(seed=1, max_tokens=200, stop=["e", "\u2028"], ignore_eos=True)),
    ("jumps over", SamplingParams(seed=1, max_tokens=200, stop=["e"], include_stop_str_in_output=True, min_tokens=5)),
    ("jumps over", SamplingParams(seed=2, max_tokens=100, stop_token_ids=list(range(100, 200)))),
    ("jumps over", SamplingParams(seed=2, max_tokens=30, skip_special_tokens=False, truncate_prompt_tokens=2)),
    ("", SamplingParams(seed=2, max_tokens=3)),
    ([1] * 2000, SamplingParams(seed=2, max_tokens=None, ignore_eos=True)),
    ("the lazy dog " * 60, SamplingParams(seed=2, max_tokens=None, truncate_prompt_tokens=50, stop="a")),
    (CHAT, SamplingParams(seed=9, max_tokens=10, logprobs=1)),
    (replace(CHAT, add_generation_prompt=False), SamplingParams(seed=9, max_tokens=10)),
    (replace(CHAT, continue_final_message=True), SamplingParams(seed=9, max_tokens=4)),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_both_ways_give_the_same(local: LLM, remote: LLM, case: int) -> None:
    prompt, params = CASES[case]
    here, there = local.submit(prompt, params).result(60), remote.submit(prompt, params).result(60)
    assert same(there) == same(here)
    assert here.outputs[0].token_ids
    assert here.finished
    assert all(one.finish_reason in ("stop", "length") for one in here.outputs)
    is_late = params.use_beam_search or (params.best_of or 0) > params.n
    if not is_late:
        for llm in (local, remote):
            pieces = list(llm.submit(prompt, params, stream=True))
            texts = ["".join(piece.outputs[index].text_diff for piece in pieces) for index in range(params.n)]
            assert texts == [one.text for one in here.outputs]
            whole = replace(
                pieces[-1],
                outputs=[
                    replace(one, text_diff=one.text, token_ids_diff=one.token_ids, logprobs_diff=one.logprobs)
                    for one in pieces[-1].outputs
                ],
            )
            assert same(whole) == same(here)


WRONG: list[tuple[Prompt, SamplingParams, type[ApiError], str | None]] = [
    ([1] * 3000, SamplingParams(), api.ContextLengthError, "prompt"),
    ([1] * 3000, SamplingParams(max_tokens=None), api.ContextLengthError, None),
    ([1] * 100, SamplingParams(max_tokens=2000), api.ContextLengthError, "max_tokens"),
    ([400], SamplingParams(), InvalidRequestError, "prompt"),
    ([-1], SamplingParams(), InvalidRequestError, "prompt"),
    ([], SamplingParams(), InvalidRequestError, "prompt"),
    ("half \ud800", SamplingParams(), InvalidRequestError, None),
    ("x", SamplingParams(temperature=9), InvalidRequestError, "temperature"),
    ("x", SamplingParams(n=1000), InvalidRequestError, "n"),
    ("x", SamplingParams(top_p=float("nan")), InvalidRequestError, "top_p"),
    (Chat([]), SamplingParams(), InvalidRequestError, None),
    (Chat([{"role": "user", "content": 5}]), SamplingParams(), InvalidRequestError, None),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_both_ways_refuse_the_same(local: LLM, remote: LLM, case: int) -> None:
    prompt, params, kind, field = WRONG[case]
    told: list[ApiError] = []
    for llm in (local, remote):
        for stream in (False, True):
            with pytest.raises(kind) as caught:
                llm.submit(prompt, params, stream=stream).result(30)
            assert type(caught.value) is kind
            told.append(caught.value)
    assert field is None or {error.param for error in told} == {field}
    assert not isinstance(prompt, Chat) or all("messages" in str(error) for error in told)


async def test_async_at_an_address(remote: LLM, local: LLM) -> None:
    params = SamplingParams(seed=4, max_tokens=30, ignore_eos=True)
    results = [remote.submit([7, index + 1], params, stream=bool(index % 2)) for index in range(20)]
    whole = await asyncio.gather(*(result.aresult() for result in results))
    expected = await asyncio.to_thread(local.generate, [[7, index + 1] for index in range(20)], params)
    assert [same(one) for one in whole] == [same(one) for one in expected]
    texts = [piece.outputs[0].text_diff async for piece in results[1]]
    assert "".join(texts) == expected[1].outputs[0].text


def test_an_abort_at_an_address_reaches_the_workers(remote: LLM) -> None:
    params = SamplingParams(max_tokens=1500, ignore_eos=True)
    streaming = remote.submit([1, 2, 3], params, stream=True)
    whole = remote.submit([1, 2, 4], params)
    for output in streaming:
        if output.outputs[0].token_ids:
            break
    with pytest.raises(TimeoutError):
        whole.result(timeout=0.05)
    for result in (streaming, whole):
        result.abort()
        result.abort()
        assert result.result(10).outputs[0].finish_reason == "cancelled"
        assert result.aborted()
    assert streaming.result().outputs[0].token_ids
    deadline_s = time.monotonic() + 10
    while (stats := remote.get_stats())["num_running"] + stats["num_used_blocks"]:
        assert time.monotonic() < deadline_s, stats
        time.sleep(0.05)  # polls for a state, bounded by the line above


def test_many_threads_at_an_address(remote: LLM, local: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts = [[1 + index % 300, 2, 1 + index // 300] for index in range(600)]
    with ThreadPoolExecutor(12) as threads:
        results = list(threads.map(lambda prompt: remote.submit(prompt, params), prompts))
    outputs = [result.result(60) for result in results]
    assert [same(one) for one in outputs] == [same(one) for one in local.generate(prompts, params)]


def test_stats_have_the_same_names(remote: LLM, local: LLM) -> None:
    before = {llm: llm.get_stats() for llm in (local, remote)}
    for llm in (local, remote):
        llm.generate([[3, 1], [3, 2]], SamplingParams(max_tokens=5, ignore_eos=True))
        after = llm.get_stats()
        assert after.keys() == before[llm].keys()
        assert after["num_output_tokens"] - before[llm]["num_output_tokens"] == 10
        assert after["num_prompt_tokens"] - before[llm]["num_prompt_tokens"] == 4
        assert after["num_free_blocks"] > 0


async def test_stats_of_a_cluster_that_computes(remote: LLM) -> None:
    result = remote.submit([1, 2, 3], SamplingParams(max_tokens=1900, ignore_eos=True), stream=True)
    async with asyncio.timeout(20):
        while (stats := await remote.aget_stats())["num_running"] == 0 or stats["num_used_blocks"] == 0:
            assert not result.finished
            await asyncio.sleep(0.05)  # polls for what workers report about once a second
    result.abort()


def test_a_request_names_itself(remote: LLM, local: LLM) -> None:
    request = Request([1, 2], SamplingParams(max_tokens=2), request_id="mine-1", timeout_s=20.5, priority=-3)
    assert local.submit(request).result(20).request_id == "mine-1"
    assert remote.submit(request).result(20).request_id == "mine-1"
    late = replace(request, timeout_s=0.001, sampling_params=SamplingParams(max_tokens=1000, ignore_eos=True))
    for llm in (local, remote):
        with pytest.raises((api.RequestTimeoutError, api.UnavailableError)):
            llm.submit(late).result(20)


def test_the_model_by_its_name(deployment: LocalDeployment) -> None:
    with LLM("tiny", address=f"{deployment.url}/v1/") as llm:
        assert llm.generate("x", SamplingParams(max_tokens=None, stop="a"))[0].outputs[0].token_ids
        assert llm.chat([{"role": "user", "content": "x"}])[0].finished
    with pytest.raises(api.ModelNotFoundError, match="tiny"):
        LLM("another", address=deployment.url)


def test_shutdown_fails_what_is_under_way(deployment: LocalDeployment) -> None:
    llm = LLM(address=deployment.url)
    result = llm.submit([1, 2, 3], SamplingParams(max_tokens=1900, ignore_eos=True))
    llm.shutdown()
    with pytest.raises(ShutDownError):
        result.result(10)
    with pytest.raises(ShutDownError):
        llm.get_stats()


def test_nobody_at_the_address() -> None:
    with pytest.raises(GatewayUnreachableError, match=r"http://127\.0\.0\.1:9"):
        LLM(address="127.0.0.1:9")


@pytest.mark.parametrize("address", ["", "ftp://x", "http://", "http://host/path", "two words"])
def test_no_address(address: str) -> None:
    with pytest.raises(SettingsError, match="address"):
        LLM(address=address)


def test_a_gateway_that_dies_in_the_midst(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_FAKE_STEP_MS", "5")
    settings = LocalSettings(port=0, engine="fake", prefill=0)
    with running(settings, tiny_model) as deployment, LLM(address=deployment.url) as llm:
        params = SamplingParams(max_tokens=1900, ignore_eos=True)
        results = [llm.submit([1, 2, n + 1], params, stream=bool(n)) for n in range(2)]
        for output in results[1]:
            if output.outputs[0].token_ids:
                break
        subprocess.run(["kill", "-KILL", str(deployment.pids["gateway"])], check=True)
        for result in results:
            with pytest.raises(GatewayUnreachableError):
                result.result(20)


def test_with_an_address_there_is_no_torch(deployment: LocalDeployment) -> None:
    program = (
        "import sys\n"
        "from kvrelay.executor import LLM\n"
        f"with LLM(address={deployment.url!r}) as llm:\n"
        "    assert llm.generate('x')[0].outputs[0].text\n"
        "print(sorted({'torch', 'tokenizers', 'fastapi', 'pydantic', 'zmq', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_told_errors_are_the_gateways_own() -> None:
    for error in (
        api.ContextLengthError("m", param="max_tokens"),
        api.UnavailableError("m", retry_after_s=3),
        api.TooManyRequestsError("m", retry_after_s=2),
        api.RequestTimeoutError("m"),
    ):
        told = told_error(error.status, error.body(), error.retry_after)
        assert (type(told), str(told), told.param, told.retry_after_s) == (
            type(error), "m", error.param, error.retry_after_s,
        )  # fmt: skip
    assert type(told_error(502, "<html>bad gateway</html>")) is api.AttemptsFailedError
    assert type(told_error(418, {"error": "short and stout"})) is ApiError


async def test_events_may_be_cut_anywhere() -> None:
    stream = b'data: {"a": "\xe2\x80\xa8"}\n\ndata:[DONE]\n\n: comment\n'

    async def pieces(size: int) -> AsyncIterator[bytes]:
        for start in range(0, len(stream), size):
            yield stream[start : start + size]

    for size in (1, 2, 5, 100):
        found = [data async for data in events(pieces(size))]
        assert found[1:] == [b"[DONE]"]
        assert json.loads(found[0]) == {"a": "\u2028"}


def test_log_probabilities_are_read_by_token_id() -> None:
    progress = Progress("r", None, 1, tells_pieces=False)
    logprobs = {
        "tokens": ["token_id:7"], "token_logprobs": [-1.0], "top_logprobs": [{"token_id:9": -0.5, "token_id:7": -1.0}],
    }  # fmt: skip
    choice = {"index": 0, "text": "x", "token_ids": [7], "prompt_token_ids": [1], "logprobs": logprobs}
    CompletionReader(progress, tells_logprobs=True).read({"choices": [choice]})
    output, _ = progress.snapshot({})
    assert output.outputs[0].logprobs == [{7: Logprob(-1.0, 2), 9: Logprob(-0.5, 1)}]
    assert output.prompt_token_ids == [1]
