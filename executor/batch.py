"""Runs many requests, in order: as many at a time as there is room for, the others as room becomes free."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Sequence

from kvrelay.executor.outputs import RequestOutput
from kvrelay.executor.request import Request
from kvrelay.executor.result import GenerationResult
from kvrelay.gateway.errors import UnavailableError

OnProgress = Callable[[int, int], None]
"""Called with (number of complete requests, number of all)."""


def run_batch(
    requests: Sequence[Request],
    submit: Callable[[Request], GenerationResult],
    *,
    max_at_a_time: int,
    on_progress: OnProgress,
) -> list[RequestOutput]:
    """The outputs of all ``requests``, in their order. Blocks. Raises the first ApiError, after aborting all other requests.

    A request that is refused for lack of room goes back to the front of the line while others of the batch run, because each that
    ends frees some room. If none of the batch runs, other requests have all the room, and the error is raised.
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
