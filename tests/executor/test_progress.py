"""Progress of a request, written on one thread and read on others: readers lose nothing, repeat nothing, and see the end."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvrelay.executor.errors import ShutDownError
from kvrelay.executor.outputs import Logprob, Piece
from kvrelay.executor.progress import Progress
from kvrelay.executor.result import GenerationResult


def streaming(num_outputs: int = 1) -> tuple[Progress, GenerationResult]:
    progress = Progress("r", None, num_outputs, tells_pieces=True)
    return progress, GenerationResult(progress, progress.finish)


def test_logprobs_add_up() -> None:
    progress, result = streaming()
    progress.on_prompt([1, 2], [None, {2: Logprob(-0.5)}], num_cached_tokens=1)
    progress.add(0, Piece("a", [7], [{7: Logprob(-1.0), 8: Logprob(-0.5, 1)}]))
    progress.add(0, Piece("b", [8], [{8: Logprob(-0.25, 1)}], "stop", 8))
    progress.finish()
    output = result.result()
    (only,) = output.outputs
    assert (only.text, only.token_ids, only.cumulative_logprob) == ("ab", [7, 8], -1.25)
    assert (only.finish_reason, only.stop_reason) == ("stop", 8)
    assert (output.prompt_token_ids, output.num_cached_tokens) == ([1, 2], 1)
    assert output.prompt_logprobs == [None, {2: Logprob(-0.5)}]


async def test_loops_and_threads_wait_together() -> None:
    progress, result = streaming()
    draws = random.Random(3)
    length = 200

    async def read() -> str:
        return "".join([output.outputs[0].text_diff async for output in result])

    async def read_elsewhere() -> str:
        return await asyncio.to_thread(lambda: asyncio.run(read()))

    def write() -> None:
        left = length
        while left:
            size = min(left, draws.randint(1, 5))
            left -= size
            progress.add(0, Piece("x" * size, [1] * size, None, None if left else "length"))
        progress.finish()

    def read_blocking() -> str:
        return "".join([output.outputs[0].text_diff for output in result])

    blocking = asyncio.to_thread(read_blocking)
    readers = [asyncio.create_task(one) for one in (read(), read_elsewhere(), read(), blocking)]
    await asyncio.to_thread(write)
    assert await asyncio.gather(*readers) == ["x" * length] * 4
    assert read_blocking() == "x" * length, "who comes late sees all of it, too"
    assert (await result).outputs[0].token_ids == [1] * length


async def test_the_last_output_is_the_finished_one() -> None:
    progress, result = streaming()
    progress.add(0, Piece("a", [1]))
    iterator = aiter(result)
    assert not (await anext(iterator)).finished
    following = asyncio.ensure_future(anext(iterator))
    progress.add(0, Piece("b", [2], None, "stop"))
    await asyncio.sleep(0)
    assert not following.done()
    progress.finish()
    last = await following
    assert (last.finished, last.outputs[0].text_diff, last.outputs[0].finish_reason) == (True, "b", "stop")


async def test_who_gives_up_waiting_leaves_it_running() -> None:
    progress, result = streaming()
    with pytest.raises(TimeoutError, match="it goes on"):
        result.result(timeout=0.01)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await result
    assert not result.finished
    progress.add(0, Piece("a", [1], None, "stop"))
    progress.finish()
    assert (await result).outputs[0].text == "a"


def test_errors_reach_everybody_and_the_first_end_counts() -> None:
    progress, result = streaming()
    ended: list[str] = []
    result.add_done_callback(lambda one: ended.append(one.request_id))
    progress.add(0, Piece("a", [1]))
    progress.finish(ShutDownError())
    progress.finish()
    result.add_done_callback(lambda one: ended.append(one.request_id))
    assert ended == ["r", "r"]
    assert not result.aborted()
    for _ in range(2):
        with pytest.raises(ShutDownError):
            result.result()
    with pytest.raises(ShutDownError):
        list(result)


def test_aborted_is_what_was_not_complete() -> None:
    progress, result = streaming(2)
    progress.add(0, Piece("a", [1], None, "stop"))
    progress.add(1, Piece("b", [1]))
    assert not result.aborted()
    result.abort()
    assert result.aborted()
    assert [one.finish_reason for one in result.result().outputs] == ["stop", "cancelled"]


def test_without_a_stream_there_is_one_output() -> None:
    progress = Progress("r", "p", 1, tells_pieces=False)
    result = GenerationResult(progress, progress.finish)
    for _ in range(3):
        progress.add(0, Piece("a", [1]))
    progress.finish()
    assert [output.outputs[0].text_diff for output in result] == ["aaa"]


async def test_a_loop_that_is_gone_holds_nobody_up() -> None:
    progress, result = streaming()

    def wait_briefly() -> None:
        loop = asyncio.new_event_loop()
        waiting = asyncio.ensure_future(result, loop=loop)
        loop.run_until_complete(asyncio.sleep(0))
        loop.call_soon(waiting.cancel)
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(waiting)
        loop.close()

    await asyncio.to_thread(wait_briefly)
    progress.add(0, Piece("a", [1], None, "stop"))
    progress.finish()
    assert (await result).finished
