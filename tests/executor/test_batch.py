"""Batches against a server with few places: order, bounds, refusals and errors."""

from __future__ import annotations

import pytest

from kvrelay.executor.batch import run_batch
from kvrelay.executor.outputs import Piece
from kvrelay.executor.progress import Progress
from kvrelay.executor.request import Request
from kvrelay.executor.result import GenerationResult
from kvrelay.gateway.errors import ApiError, InvalidRequestError, UnavailableError


class Server:
    """Takes ``num_places`` requests and refuses others. When all places are taken, it serves the latest request first."""

    def __init__(self, num_places: int, num_taken: int = 0) -> None:
        self.num_places = num_places
        self.num_taken = num_taken  # places taken by other clients
        self.running: list[tuple[Request, Progress]] = []
        self.num_submits = 0
        self.aborted: list[object] = []

    def submit(self, request: Request) -> GenerationResult:
        self.num_submits += 1
        progress = Progress(str(request.prompt), None, 1, tells_pieces=False)

        def abort() -> None:
            self.aborted.append(request.prompt)
            progress.finish()

        if len(self.running) + self.num_taken >= self.num_places:
            progress.finish(UnavailableError("no room", retry_after_s=1.0))
            if self.running:
                self.serve()
        else:
            self.running.append((request, progress))
            if len(self.running) == self.num_places:
                self.serve()
        return GenerationResult(progress, abort)

    def serve(self) -> None:
        request, progress = self.running.pop()
        if request.prompt == "bad":
            progress.finish(InvalidRequestError("bad"))
        else:
            progress.add(0, Piece(str(request.prompt), [1], None, "stop"))
            progress.finish()


def test_outputs_come_in_order_however_few_places_there_are() -> None:
    server = Server(num_places=1)
    heard: list[tuple[int, int]] = []
    prompts = [Request(str(index)) for index in range(50)]
    outputs = run_batch(
        prompts, server.submit, max_at_a_time=8, on_progress=lambda done, total: heard.append((done, total))
    )
    assert [output.outputs[0].text for output in outputs] == [str(index) for index in range(50)]
    assert heard == [(done, 50) for done in range(1, 51)]


def test_without_any_room_the_refusal_is_raised() -> None:
    server = Server(num_places=2, num_taken=2)
    with pytest.raises(UnavailableError, match="no room"):
        run_batch([Request("a"), Request("b")], server.submit, max_at_a_time=1, on_progress=lambda *_: None)
    assert server.num_submits == 1


def test_the_first_error_ends_the_others() -> None:
    server = Server(num_places=4)
    prompts = [Request(prompt) for prompt in ("a", "b", "c", "bad", "d", "e")]
    with pytest.raises(ApiError, match="bad"):
        run_batch(prompts, server.submit, max_at_a_time=4, on_progress=lambda *_: None)
    assert sorted(map(str, server.aborted)) == ["a", "b", "c"]
