"""Many requests at once, in order: as many at a time as find room, the others when some are done."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Sequence

from kvrelay.executor.outputs import RequestOutput
from kvrelay.executor.request import Request
from kvrelay.executor.result import GenerationResult
from kvrelay.gateway.errors import UnavailableError

OnProgress = Callable[[int, int], None]
"""Hears (requests that are complete, all)."""


def run_batch(
    requests: Sequence[Request],
    submit: Callable[[Request], GenerationResult],
    *,
    max_at_a_time: int,
    on_progress: OnProgress,
) -> list[RequestOutput]:
    """The outputs of all ``requests``, in their order. Blocks. Raises the first ApiError, after all others were aborted.

    A request that is refused for want of room goes back in front of those to come as long as others of the batch run: each that
    ends leaves some. Without any that run it is others who have it all, and the error is raised.
    """
    waiting = deque(range(len(requests)))
    running: dict[int, GenerationResult] = {}
    outputs: dict[int, RequestOutput] = {}
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    limit = max_at_a_time
    try:
        while len(outputs) < len(requests):
            while waiting and len(running) < limit:
                index = waiting.popleft()
                result = running[index] = submit(requests[index])
                result.add_done_callback(lambda _, index=index: done.put(index))  # type: ignore[misc]
            index = done.get()
            result = running.pop(index)
            try:
                outputs[index] = result.result()
            except UnavailableError as error:
                if error.retry_after_s is None or not running:
                    raise
                waiting.appendleft(index)
                limit = len(running)
                continue
            limit = min(max_at_a_time, limit + 1)
            on_progress(len(outputs), len(requests))
    finally:
        for result in running.values():
            result.abort()
    return [outputs[index] for index in range(len(requests))]
