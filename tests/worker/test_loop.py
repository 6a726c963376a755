"""The model loop's thread: what wakes it, which errors it survives, and how it ends."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from kvrelay.engine.images.interface import ImageError
from kvrelay.worker import loop as loop_module
from kvrelay.worker.loop import ModelLoop

WAIT_S = 30.0
BROKEN = -99  # a command after which the worker does not trust itself


class Scripted:
    """A worker whose commands are numbers of steps to run. It puts every call into ``events``."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.threads: set[int] = set()
        self.num_left = 0
        self.has_room = True
        self.error: Exception | None = None
        self.next_error: Exception | None = None
        self.may_step = threading.Event()
        self.may_step.set()
        self.num_checks_left = 0
        self.may_check = threading.Event()
        self.may_check.set()

    def handle(self, command: int) -> None:
        self.threads.add(threading.get_ident())
        self.events.put(f"handle {command}")
        if command < 0:
            raise ValueError(command)
        self.num_left += command

    def has_work(self) -> bool:
        return self.num_left > 0

    @property
    def is_checking(self) -> bool:
        return self.num_checks_left > 0

    def idle(self) -> None:
        if self.num_checks_left:
            self.events.put("check")
            assert self.may_check.wait(WAIT_S)
            self.num_checks_left -= 1

    def step(self) -> bool:
        self.threads.add(threading.get_ident())
        has_room, error = self.has_room, self.error  # read before the test sees the step and changes them
        self.events.put("step")
        assert self.may_step.wait(WAIT_S)
        if error is not None:
            raise error
        if not has_room:
            return False
        self.num_left -= 1
        return True

    def leave(self) -> None:
        self.threads.add(threading.get_ident())

    def on_step_failed(self, error: Exception) -> None:
        self.num_left = 0
        self.error = self.next_error
        self.events.put(f"failed {error}")

    def on_command_failed(self, command: int, error: Exception) -> None:
        self.events.put(f"refused {command}")
        if command == BROKEN:
            raise AssertionError("the books do not agree")

    def expect(self, *events: str) -> None:
        assert [self.events.get(timeout=WAIT_S) for _ in events] == list(events)


def made(worker: Scripted, name: str, clock: Callable[[], float]) -> ModelLoop:
    return ModelLoop(cast("Any", worker), name, clock)


@pytest.fixture
def worker() -> Scripted:
    return Scripted()


@pytest.fixture
def loop(worker: Scripted) -> Iterator[ModelLoop]:
    loop = made(worker, "model", lambda: 0.0)
    yield loop
    worker.may_step.set()
    assert loop.stop()
    assert worker.events.empty()


def test_commands_are_handled_and_steps_run_on_one_thread(worker: Scripted, loop: ModelLoop) -> None:
    loop.post(cast("Any", 1))
    loop.post(cast("Any", 2))
    assert not loop.is_alive
    loop.start()
    worker.expect("handle 1", "handle 2", "step", "step", "step")
    loop.post(cast("Any", 1))  # the loop waits by now, or soon will
    worker.expect("handle 1", "step")
    assert loop.is_alive
    assert len(worker.threads) == 1
    assert threading.get_ident() not in worker.threads


def test_commands_that_come_during_a_step_are_handled_before_the_next(worker: Scripted, loop: ModelLoop) -> None:
    worker.may_step.clear()
    loop.post(cast("Any", 2))
    loop.start()
    worker.expect("handle 2", "step")
    loop.post(cast("Any", 3))
    loop.post(cast("Any", 4))
    worker.may_step.set()
    worker.expect("handle 3", "handle 4", *["step"] * 8)


def test_without_room_it_waits_for_news(worker: Scripted, loop: ModelLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_IDLE_TICK_S", WAIT_S)
    worker.has_room = False
    loop.post(cast("Any", 1))
    loop.start()
    worker.expect("handle 1", "step")
    loop.wake()
    worker.expect("step")  # the loop tried once, found no room, and waits again
    worker.has_room = True
    loop.wake()
    worker.expect("step")


def test_an_idle_worker_checks_itself_and_work_comes_in_between(worker: Scripted, loop: ModelLoop) -> None:
    worker.num_checks_left = 2
    worker.may_check.clear()
    loop.start()
    worker.expect("check")
    loop.post(cast("Any", 1))
    worker.may_check.set()
    worker.expect("handle 1", "step", "check")


def test_a_step_that_fails_is_told_and_logged_and_the_loop_goes_on(
    worker: Scripted, loop: ModelLoop, caplog: pytest.LogCaptureFixture
) -> None:
    worker.error = RuntimeError("out of cheese")
    loop.post(cast("Any", 1))
    loop.start()
    worker.expect("handle 1", "step", "failed out of cheese")
    loop.post(cast("Any", 1))
    worker.expect("handle 1", "step")
    assert [(record.levelno, record.message) for record in caplog.records] == [(logging.ERROR, "a model step failed")]


def test_an_idle_loop_shows_that_it_is_alive(worker: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_IDLE_TICK_S", 0.001)
    now_s, looks, looked = 0.0, itertools.count(), threading.Event()

    def clock() -> float:
        if next(looks) >= 8:
            looked.set()
        return now_s

    loop = made(worker, "model", clock)
    now_s = 50.0
    loop.start()
    assert looked.wait(WAIT_S)
    assert loop.problems(0.0) == []
    assert loop.stop()
    assert loop.problems(1000.0) == ["the model loop is dead"]


def test_a_loop_that_does_not_come_round_is_noticed(worker: Scripted) -> None:
    now_s = 0.0
    worker.may_step.clear()
    loop = made(worker, "model", lambda: now_s)
    loop.post(cast("Any", 1))
    loop.start()
    worker.expect("handle 1", "step")
    now_s = 31.0
    assert loop.problems(30.0) == ["the model loop has not ticked for 31 s"]
    assert loop.problems(300.0) == []
    worker.may_step.set()
    assert loop.stop()


def test_stop_ends_behind_the_running_step(worker: Scripted) -> None:
    worker.may_step.clear()
    loop = made(worker, "model", lambda: 0.0)
    loop.post(cast("Any", 5))
    loop.start()
    worker.expect("handle 5", "step")
    assert not loop.stop(timeout_s=0.01)
    assert loop.is_alive
    worker.may_step.set()
    assert loop.stop()
    assert worker.num_left == 4
    assert worker.events.empty()


def test_a_loop_that_never_started_can_be_stopped(worker: Scripted) -> None:
    assert made(worker, "model", lambda: 0.0).stop()


def test_a_command_that_fails_is_told_and_logged_and_the_loop_goes_on(
    worker: Scripted, loop: ModelLoop, caplog: pytest.LogCaptureFixture
) -> None:
    loop.post(cast("Any", -1))
    loop.post(cast("Any", 1))
    loop.start()
    worker.expect("handle -1", "refused -1", "handle 1", "step")
    messages = [(record.levelno, record.message) for record in caplog.records]
    assert messages == [(logging.ERROR, "a command to the model loop failed")]


def test_a_worker_that_does_not_trust_itself_any_more_ends_the_loop(
    worker: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    loop = made(worker, "model", lambda: 0.0)
    loop.post(cast("Any", BROKEN))
    loop.post(cast("Any", 1))
    loop.start()
    worker.expect(f"handle {BROKEN}", f"refused {BROKEN}")
    loop._thread.join(WAIT_S)
    assert not loop.is_alive
    assert worker.events.empty(), "it went on"
    assert caplog.records[-1].levelno == logging.CRITICAL
    assert loop.stop()


def test_images_that_cannot_be_encoded_do_not_end_the_loop(worker: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a client could end worker after worker."""
    monkeypatch.setattr(loop_module, "_MAX_FAILED_STEPS", 3)
    loop = made(worker, "model", lambda: 0.0)
    worker.error = worker.next_error = ImageError("image 0 is too thin")
    loop.start()
    for _ in range(5):
        loop.post(cast("Any", 1))
        worker.expect("handle 1", "step", "failed image 0 is too thin")
    assert loop.is_alive
    assert loop.stop()


def test_steps_that_fail_one_after_the_other_end_the_loop(worker: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three failed steps in a row end the loop; a good step resets the count. A worker that fails fast would attract requests."""
    monkeypatch.setattr(loop_module, "_MAX_FAILED_STEPS", 3)
    loop = made(worker, "model", lambda: 0.0)
    worker.error = worker.next_error = RuntimeError("illegal access")
    failure = ("handle 1", "step", "failed illegal access")
    loop.start()
    for _ in range(2):
        loop.post(cast("Any", 1))
        worker.expect(*failure)
    worker.error = worker.next_error = None
    loop.post(cast("Any", 1))
    worker.expect("handle 1", "step")  # resets the count
    worker.error = worker.next_error = RuntimeError("illegal access")
    for _ in range(3):
        loop.post(cast("Any", 1))
        worker.expect(*failure)
    loop._thread.join(WAIT_S)
    assert not loop.is_alive
    assert loop.stop()
