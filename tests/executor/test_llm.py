"""The class LLM over a model in this process: sync and async use, single requests and batches, and shutdown."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.common.errors import KvrelayError, ModelError, SettingsError
from kvrelay.engine.fake.language import expected_output
from kvrelay.executor import LLM, Chat, InvalidRequestError, Prompt, Request, SamplingParams, UnavailableError
from kvrelay.gateway.errors import RequestTimeoutError

from ..gateway.pictures import part, picture
from .conftest import VOCAB

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), engine="fake", fake_step_ms=0, num_blocks=128, max_num_seqs=16) as made:
        yield made


def test_one_prompt_is_a_batch_of_one(llm: LLM) -> None:
    expected = expected_output([1, 2, 3], 6, VOCAB)
    for prompt in ([1, 2, 3], [[1, 2, 3]]):
        (output,) = llm.generate(prompt, GREEDY)
        assert output.outputs[0].token_ids == expected
    (output,) = llm.generate(Request([1, 2, 3], GREEDY))
    assert output.outputs[0].token_ids == expected
    assert llm.generate([]) == []
    assert llm.generate("the fox")[0].prompt == "the fox"


def test_parameters_for_each(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in (1, 2, 3)]
    outputs = llm.generate(["a", "b", "c"], params)
    assert [len(one.outputs[0].token_ids) for one in outputs] == [1, 2, 3]
    with pytest.raises(InvalidRequestError, match="2 sampling_params are given for 3"):
        llm.generate(["a", "b", "c"], params[:2])


def test_three_choices(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=7, logprobs=1, ignore_eos=True)
    (output,) = llm.generate("the quick", params)
    assert [one.index for one in output.outputs] == [0, 1, 2]
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3
    for one in output.outputs:
        assert one.logprobs is not None
        assert one.cumulative_logprob == pytest.approx(
            sum(of_token[token_id].logprob for token_id, of_token in zip(one.token_ids, one.logprobs, strict=True))
        )
    assert llm.generate("the quick", params)[0].outputs == output.outputs


def test_chats(llm: LLM) -> None:
    messages = [{"role": "user", "content": "the fox"}]
    (one,) = llm.generate(Chat(messages), GREEDY)
    several = llm.generate([Chat(messages), Chat(messages)], GREEDY)
    (raw,) = llm.generate("<|user|>the fox\n<|assistant|>", GREEDY)
    assert one.outputs == raw.outputs == several[0].outputs == several[1].outputs
    assert one.prompt_token_ids == raw.prompt_token_ids
    assert llm.submit(Chat(messages), GREEDY).result(20).outputs == raw.outputs
    (open_end,) = llm.generate(Chat(messages, continue_final_message=True), GREEDY)
    assert open_end.prompt_token_ids == llm.generate("<|user|>the fox", GREEDY)[0].prompt_token_ids


async def test_async_use(llm: LLM) -> None:
    results = [llm.submit([4, 1 + index], GREEDY, stream=index % 2 == 0) for index in range(10)]
    outputs = await asyncio.gather(*results)
    assert [one.outputs[0].token_ids for one in outputs] == [expected_output([4, 1 + n], 6, VOCAB) for n in range(10)]
    seen: list[int] = []
    async for output in llm.submit([8, 8], GREEDY, stream=True):
        seen += output.outputs[0].token_ids_diff
        assert output.outputs[0].token_ids == seen
    assert seen == expected_output([8, 8], 6, VOCAB)


def test_stats_count_tokens(llm: LLM) -> None:
    before = llm.get_stats()
    llm.generate([[3, 1], [3, 2]], SamplingParams(max_tokens=5, ignore_eos=True))
    after = llm.get_stats()
    assert after["num_output_tokens"] - before["num_output_tokens"] == 10
    assert after["num_prompt_tokens"] - before["num_prompt_tokens"] == 4
    assert after["num_free_blocks"] > 0


def test_a_request_names_itself_and_its_time(llm: LLM) -> None:
    request = Request([1, 2], SamplingParams(max_tokens=2), request_id="mine-1", timeout_s=20.5, priority=-3)
    assert llm.submit(request).result(20).request_id == "mine-1"
    late = replace(request, timeout_s=0.001, sampling_params=SamplingParams(max_tokens=1000, ignore_eos=True))
    with pytest.raises((RequestTimeoutError, UnavailableError)):
        llm.submit(late).result(20)


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([1] * 3000, SamplingParams(), "prompt"),
        ([1] * 100, SamplingParams(max_tokens=2000), "max_tokens"),
        ([400], SamplingParams(), "prompt"),
        ([-1], SamplingParams(), "prompt"),
        ("x", SamplingParams(n=1000), "n"),
        (Chat([]), SamplingParams(), "messages"),
        (
            Chat([{"role": "user", "content": [part(picture())]}]),
            SamplingParams(),
            "messages",
        ),  # its template shows none
    ],
)
def test_what_is_wrong_comes_out_of_the_result(llm: LLM, prompt: Prompt, params: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.submit(prompt, params).result(20)
    assert caught.value.param == field


HELLO = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda llm: llm.generate(7), "the prompt is '7'; give one text, one list of token ids"),
        (lambda llm: llm.generate(None), "the prompt is 'None'; give one text"),
        (lambda llm: llm.generate(b"the fox"), "the prompt is .*the fox.*; give one text"),
        (lambda llm: llm.generate("a", 7), r"sampling_params is '7'; give SamplingParams\(…\)"),
        (lambda llm: llm.generate("a", {"n": 1}), "sampling_params is .*'n': 1"),
        (lambda llm: llm.submit("a", "b"), "sampling_params is 'b'"),
        (lambda llm: Request("a", {"n": 1}), "sampling_params is"),
        (lambda llm: Request("a", request_id={}), "request_id is '{}'; it must be 1 to 128"),
        (lambda llm: Request("a", timeout_s="x"), "timeout_s is 'x'; it must be a number above 0"),
        (lambda llm: llm.submit(Chat(7)), "messages is '7'; it must be a list of messages"),
        (lambda llm: llm.submit(Chat("x")), "messages is 'x'"),
        (lambda llm: llm.submit(Chat([7])).result(20), "messages.0: Input should be an object, not 7"),
        (lambda llm: llm.submit(Chat(HELLO, tools=7)).result(20), "tools: Input should be a valid array, not 7"),
        (lambda llm: llm.submit(Chat(HELLO, tools=[7])).result(20), "tools.0: Input should be .* not 7"),
        (lambda llm: llm.submit(Chat(HELLO, chat_template_kwargs=7)).result(20), "chat_template_kwargs: .* not 7"),
        (lambda llm: llm.submit("a", SamplingParams(logit_bias=7)).result(20), "logit_bias: .* not 7"),
        (lambda llm: llm.submit("\ud800").result(20), "cannot be written as JSON: .*surrogates not allowed"),
    ],
)  # fmt: skip
def test_a_value_of_a_wrong_type_is_named(llm: LLM, ask: Callable[[LLM], object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        ask(llm)


def test_the_best_of_several_and_beams(llm: LLM) -> None:
    """The best two of four choices, or of three beams, are returned, numbered from 0."""
    for params in (
        SamplingParams(seed=3, n=2, best_of=4, max_tokens=6, logprobs=2),
        SamplingParams(use_beam_search=True, beam_width=3, n=2, max_tokens=6, temperature=0),
    ):
        whole = llm.submit("a dog", params).result(20)
        assert [one.index for one in whole.outputs] == [0, 1]
        assert all(one.finish_reason for one in whole.outputs)


def test_a_second_question_finds_its_prefix(llm: LLM) -> None:
    prompt = list(range(1, 100))
    llm.generate(prompt, GREEDY)
    (again,) = llm.generate(prompt, GREEDY)
    assert again.num_cached_tokens == 96
    for output in llm.submit(prompt, GREEDY, stream=True):
        assert output.num_cached_tokens == 96


def test_bad_options() -> None:
    with pytest.raises(SettingsError, match="unknown setting 'speed'"):
        LLM("demo", speed=9)
    with pytest.raises(SettingsError, match="max-num-seqs is 0"):
        LLM("demo", max_num_seqs=0)
    with pytest.raises(ModelError, match="not a directory"):
        LLM("/nowhere/at/all")


def test_a_worker_that_cannot_start_leaves_nothing(tiny_model: Path, private_tmp: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(KvrelayError, match="max-batched-tokens"):
        LLM(str(tiny_model), engine="fake", max_num_seqs=100, max_batched_tokens=50)
    assert not set(threading.enumerate()) - before
    assert list(private_tmp.iterdir()) == []


def test_a_long_temporary_directory_is_no_obstacle(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with LLM(str(tiny_model), engine="fake", fake_step_ms=0) as llm:
        assert llm.generate([1, 2], GREEDY)[0].finished
    assert list(deep.iterdir()) == []


def test_nobody_knows_it_any_more(tiny_model: Path, private_tmp: Path) -> None:
    """An LLM without references shuts itself down. A result keeps its LLM alive."""
    before = set(threading.enumerate())
    llm = LLM(str(tiny_model), engine="fake", fake_step_ms=1)
    known = weakref.ref(llm)
    result = llm.submit([1, 2], SamplingParams(max_tokens=200, ignore_eos=True))
    del llm
    gc.collect()
    assert known() is not None
    assert len(result.result(20).outputs[0].token_ids) == 200
    del result
    gc.collect()
    assert known() is None
    assert not set(threading.enumerate()) - before
    assert list(private_tmp.iterdir()) == []


PROGRAM = """
import sys
from kvrelay.executor import LLM, SamplingParams
llm = LLM({model!r}, engine="fake", fake_step_ms={step_ms})
result = llm.submit([1, 2, 3], SamplingParams(max_tokens=2000, ignore_eos=True), stream=True)
for output in result:
    if output.outputs[0].token_ids:
        break
print("going", flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["raise SystemExit(3)", "del llm, result"])
def test_an_interpreter_that_exits_does_not_hang(tiny_model: Path, tmp_path: Path, end: str) -> None:
    """The program exits during a request without a shutdown. It ends with its own exit code, no error message and no file left."""
    program = PROGRAM.format(model=str(tiny_model), step_ms=50, end=end)
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True, text=True, timeout=120, check=False, env={"TMPDIR": str(tmp_path), "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    assert done.stdout == "going\n"
    assert (done.returncode, done.stderr) == (3 if "3" in end else 0, "")
    assert list(tmp_path.iterdir()) == []
