"""The model loop: one thread that computes, fed by commands. It never touches the network.

``post`` puts a command into the loop's inbox, from any thread. The loop takes all waiting commands, then lets the worker run one
step. Without work it lets the worker check itself, and waits for the next command. Results leave through the worker's own
callbacks. ``problems`` reports a loop that has made no turn for long; readiness checks it.

A failed step or command ends the requests that it concerned, and the loop continues. Two things end the loop: the worker raises,
because its state cannot be trusted or its device has failed, or too many steps fail in a row. The loop is then not alive, and the
process must be restarted.
"""

from __future__ import annotations

import logging
import queue
import threading

from kvrelay.common.clock import Clock
from kvrelay.engine.images.interface import ImageError
from kvrelay.worker.model_worker import Command, ModelWorker

logger = logging.getLogger(__name__)

_IDLE_TICK_S = 1.0  # how long an idle loop waits before it ticks again
# Most failures in a row. A device that fails every step would do so fast, and attract all traffic.
_MAX_FAILED_STEPS = 10


class ModelLoop:
    """Owns the thread. ``start`` once, ``stop`` once."""

    def __init__(self, worker: ModelWorker, name: str, clock: Clock) -> None:
        self._worker = worker
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._clock = clock
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._stopping = threading.Event()
        self._last_tick_s = clock()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def post(self, command: Command) -> None:
        """Hand a command to the loop. From any thread; never blocks."""
        self._inbox.put(command)

    def wake(self) -> None:
        """Make the loop look for work, for instance because blocks were released. From any thread."""
        self._inbox.put(None)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def problems(self, bound_s: float) -> list[str]:
        """Why the loop is not healthy: it died, or made no turn for ``bound_s`` seconds. Empty if healthy."""
        if not self.is_alive:
            return ["the model loop is dead"]
        silent_s = self._clock() - self._last_tick_s
        return [f"the model loop has not ticked for {silent_s:.0f} s"] if silent_s > bound_s else []

    def stop(self, timeout_s: float = 30.0) -> bool:
        """End the loop after the running step. False if it did not end in time."""
        self._stopping.set()
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._turn()
        except Exception:
            logger.critical("the model loop ends: the worker cannot go on", exc_info=True)
        finally:
            self._worker.leave()

    def _turn(self) -> None:
        could_compute, num_failed = True, 0
        while not self._stopping.is_set():
            self._drain(wait=not (self._worker.is_checking or (could_compute and self._worker.has_work())))
            self._last_tick_s = self._clock()
            if self._stopping.is_set():
                continue
            if not self._worker.has_work():
                could_compute = True
                self._worker.idle()
                continue
            try:
                could_compute = self._worker.step()
                num_failed = 0
            except Exception as error:
                logger.exception("a model step failed")
                self._worker.on_step_failed(error)
                could_compute = True
                if isinstance(error, ImageError):  # a client's fault, and clients must not end the worker
                    continue
                num_failed += 1
                if num_failed >= _MAX_FAILED_STEPS:
                    raise RuntimeError(f"{num_failed} model steps failed in a row") from error

    def _drain(self, *, wait: bool) -> None:
        try:
            command = self._inbox.get(timeout=_IDLE_TICK_S) if wait else self._inbox.get_nowait()
            while True:
                if command is not None:
                    self._handle(command)
                command = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _handle(self, command: Command) -> None:
        try:
            self._worker.handle(command)
        except Exception as error:
            logger.exception("a command to the model loop failed")
            self._worker.on_command_failed(command, error)
