"""The executor over a worker in this process: many threads, aborts, errors, shutdown, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers

from kvrelay.engine.fake.language import expected_output
from kvrelay.engine.fake.step import Share
from kvrelay.executor.errors import ShutDownError, WorkerDiedError
from kvrelay.executor.executor import Executor, Stats, Submitted
from kvrelay.executor.outputs import Piece
from kvrelay.executor.progress import Progress
from kvrelay.executor.request import Chat, Request
from kvrelay.executor.result import GenerationResult
from kvrelay.executor.sampling import SamplingParams
from kvrelay.gateway.errors import ApiError, UnavailableError

from ..relay.gate import Gate
from .conftest import VOCAB, MakeExecutor, wait_until_free

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)


def result_of(executor: Executor, submitted: Submitted) -> GenerationResult:
    return GenerationResult(submitted.progress, lambda: executor.abort(submitted))


def test_hundreds_of_submits_from_many_threads(make_executor: MakeExecutor) -> None:
    executor, backend = make_executor(max_queued=100_000, room_timeout_s=10_000, request_timeout_s=10_000)
    prompts = [[1 + index % 300, 2 + index // 300, 3] for index in range(600)]

    def ask(prompt: list[int]) -> Submitted:
        return executor.submit(Request(prompt, GREEDY), stream=False)

    with ThreadPoolExecutor(20) as threads:
        submitted = list(threads.map(ask, prompts))
    for prompt, one in zip(prompts, submitted, strict=True):
        output = result_of(executor, one).result(60)
        assert output.outputs[0].token_ids == expected_output(prompt, 8, VOCAB)
    wait_until_free(backend.worker)


def test_a_chats_answer_begins_a_text_and_other_outputs_go_on_with_their_prompts(
    make_executor: MakeExecutor, tmp_path: Path
) -> None:
    """A tokenizer of SentencePiece's kind drops the space at the beginning of a text. The same chat over HTTP begins so, too."""
    words = {f"▁w{token_id}": token_id for token_id in range(VOCAB)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "▁w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    executor, _ = make_executor(directory=tmp_path)
    said = " ".join(f"w{token_id}" for token_id in expected_output([7], 8, VOCAB))
    messages = [{"role": "assistant", "content": "w7"}]
    for prompt, text in (
        (Chat(messages), said),
        (Chat(messages, continue_final_message=True), f" {said}"),
        ("w7", f" {said}"),
    ):
        output = result_of(executor, executor.submit(Request(prompt, GREEDY), stream=False)).result(20)
        assert output.outputs[0].text == text


def test_admission_bounds_what_waits(make_executor: MakeExecutor) -> None:
    """The batch is held and the queue is full. Further requests are refused at once, and all others finish."""
    gate = Gate(1)
    executor, backend = make_executor(gate, max_queued=5, max_num_seqs=4)
    submitted = [executor.submit(Request([5, 6, index + 1], GREEDY), stream=False) for index in range(50)]
    refused, latest_s = 0, time.monotonic() + 30
    # No request can finish while the gate is shut: one that is over was refused, and of the others five wait.
    while refused + 5 + len(backend.worker.service.entries) < 50:
        assert time.monotonic() < latest_s, (refused, len(backend.worker.service.entries))
        time.sleep(0.002)
        refused = sum(one.progress.over.done() for one in submitted)
    assert refused >= 50 - 5 - (4 + 4 // 4 + 4)
    gate.open()
    errors: list[ApiError] = []
    for index, one in enumerate(submitted):
        try:
            output = result_of(executor, one).result(30)
            assert output.outputs[0].token_ids == expected_output([5, 6, index + 1], 8, VOCAB)
        except UnavailableError as error:
            errors.append(error)
    assert len(errors) == refused
    assert all("which is the limit" in str(error) and error.retry_after_s for error in errors)
    wait_until_free(backend.worker)


def test_an_abort_frees_blocks_and_keeps_what_has_come(make_executor: MakeExecutor) -> None:
    gate = Gate(3)
    executor, backend = make_executor(gate)
    submitted = executor.submit(Request(list(range(1, 60)), LONG), stream=True)
    result = result_of(executor, submitted)
    for output in result:
        if len(output.outputs[0].token_ids) == 3:
            break
    assert backend.worker.blocks.ledger().num_running > 0
    result.abort()
    result.abort()
    gate.open()
    output = result.result(20)
    assert result.aborted()
    assert output.outputs[0].finish_reason == "cancelled"
    assert output.outputs[0].token_ids == expected_output(list(range(1, 60)), 3, VOCAB)
    wait_until_free(backend.worker)
    result.abort()
    assert result.result().outputs == output.outputs


def test_aborts_at_every_moment(make_executor: MakeExecutor) -> None:
    """Requests are aborted right after submit, in a queue or on the worker. Their blocks are freed, and other answers are right."""
    executor, backend = make_executor(
        max_num_seqs=4, max_queued=10_000, room_timeout_s=10_000, request_timeout_s=10_000
    )
    kept: list[tuple[list[int], Submitted]] = []
    aborted: list[Submitted] = []
    for index in range(300):
        prompt = [1 + index, 2, 3]
        submitted = executor.submit(Request(prompt, GREEDY), stream=False)
        if index % 3:
            executor.abort(submitted)
            aborted.append(submitted)
        else:
            kept.append((prompt, submitted))
    for prompt, submitted in kept:
        assert result_of(executor, submitted).result(30).outputs[0].token_ids == expected_output(prompt, 8, VOCAB)
    for submitted in aborted:
        assert result_of(executor, submitted).result(30).finished
    wait_until_free(backend.worker)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_model_thread_that_dies_ends_everything_honestly(make_executor: MakeExecutor) -> None:
    def die(rows: Sequence[Share]) -> None:
        if any(row.sequence.num_output_tokens >= 3 for row in rows):
            raise SystemExit  # ends the model thread

    executor, _ = make_executor(die)
    results = [result_of(executor, executor.submit(Request([1, 2, n + 1], LONG), stream=True)) for n in range(5)]
    for result in results:
        with pytest.raises(WorkerDiedError, match="the model loop is dead"):
            result.result(20)
    with pytest.raises(WorkerDiedError):
        result_of(executor, executor.submit(Request([1], GREEDY), stream=False)).result(20)
    with pytest.raises(WorkerDiedError):
        executor.stats().result(20)


def test_steps_that_fail_end_their_requests_only(make_executor: MakeExecutor, caplog: pytest.LogCaptureFixture) -> None:
    def fail(rows: Sequence[Share]) -> None:
        if any(row.sequence.token_ids[0] == 13 for row in rows):
            raise RuntimeError("no luck")

    executor, backend = make_executor(fail, max_attempts=2)
    with pytest.raises(ApiError, match="2"):
        result_of(executor, executor.submit(Request([13, 1], GREEDY), stream=False)).result(20)
    output = result_of(executor, executor.submit(Request([14, 1], GREEDY), stream=False)).result(20)
    assert output.outputs[0].token_ids == expected_output([14, 1], 8, VOCAB)
    wait_until_free(backend.worker)


def test_shutdown_ends_what_runs_and_what_comes(make_executor: MakeExecutor) -> None:
    gate = Gate(2)
    executor, _ = make_executor(gate)
    running = result_of(executor, executor.submit(Request([1, 2], LONG), stream=True))
    assert gate.reached.wait(20)
    ending = threading.Thread(target=executor.shutdown)
    ending.start()
    with pytest.raises(ShutDownError):
        running.result(20)
    gate.open()
    ending.join(20)
    with pytest.raises(ShutDownError):
        result_of(executor, executor.submit(Request([1], GREEDY), stream=False)).result(20)
    with pytest.raises(ShutDownError):
        executor.stats().result(20)
    running.abort()
    executor.shutdown()


def test_shutdown_leaves_nothing(tiny_model: Path, socket_directory: Path) -> None:
    """A program starts and shuts down executors. No thread, process, port, descriptor or file is left."""
    program = Path(__file__).with_name("leaves_nothing.py")
    done = subprocess.run(
        [sys.executable, "-P", str(program), str(tiny_model)],
        capture_output=True, text=True, timeout=300, check=False, env={"TMPDIR": str(socket_directory)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


class BrokenBackend:
    """A backend that fails at its start, at its stop, or for the prompt "bug"."""

    def __init__(self, *, at_start: bool = False, at_stop: bool = False) -> None:
        self.at_start, self.at_stop = at_start, at_stop
        self.is_stopped = False

    async def start(self) -> None:
        if self.at_start:
            raise UnavailableError("nobody there")

    async def run(self, request: Request, progress: Progress, *, stream: bool) -> None:
        progress.add(0, Piece("a", [1]))
        if request.prompt == "bug":
            raise KeyError("bug")
        await asyncio.Event().wait()

    async def stats(self) -> Stats:
        await asyncio.Event().wait()
        return {}

    def not_live(self) -> list[str]:
        return []

    async def stop(self) -> None:
        self.is_stopped = True
        if self.at_stop:
            raise RuntimeError("cannot stop")


def test_a_backend_that_does_not_start() -> None:
    backend = BrokenBackend(at_start=True)
    executor = Executor(backend)
    with pytest.raises(UnavailableError, match="nobody there"):
        executor.start()
    assert backend.is_stopped
    with pytest.raises(ShutDownError):
        result_of(executor, executor.submit(Request("x"), stream=False)).result(20)


def test_a_bug_in_the_backend_is_an_error_of_its_request() -> None:
    executor = Executor(BrokenBackend())
    executor.start()
    with pytest.raises(ApiError, match="bug"):
        result_of(executor, executor.submit(Request("bug"), stream=False)).result(20)
    waiting = executor.submit(Request("x"), stream=False)
    stats = executor.stats()
    executor.shutdown()
    with pytest.raises(ShutDownError):
        result_of(executor, waiting).result(20)
    assert stats.cancelled()


def test_a_thread_that_dies_fails_what_is_open() -> None:
    executor = Executor(BrokenBackend(at_stop=True))
    executor.start()
    waiting = executor.submit(Request("x"), stream=False)
    executor.shutdown()
    with pytest.raises(ApiError):
        result_of(executor, waiting).result(20)


def test_a_forked_process_leaves_it_alone(make_executor: MakeExecutor) -> None:
    executor, _ = make_executor()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns when a process with threads forks
        child = os.fork()
    if child == 0:
        executor.shutdown()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    output = result_of(executor, executor.submit(Request([1, 2], GREEDY), stream=False)).result(20)
    assert output.outputs[0].token_ids == expected_output([1, 2], 8, VOCAB)
