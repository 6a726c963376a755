"""The leader's own part of a load, on a thread of its own: the load ends at once if another rank cannot load.

Nothing can interrupt a thread that reads weights. So the caller waits beside it, and leaves it behind if it does not end soon.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from kvrelay.common.errors import ModelError

T = TypeVar("T")
Progress = Callable[[int, int], None]

_LOOK_S = 0.1  # how often it is asked whether a rank is lost
_END_S = 3.0  # time for the thread to end by itself, when a rank is lost


class OwnLoad(Generic[T]):
    """One load. Its thread does not keep the process from ending."""

    def __init__(self, load: Callable[[], T], why_lost: Callable[[], str | None]) -> None:
        """Starts ``load``, which owns all that it opens. ``why_lost``: why a rank is lost; None: none is."""
        self._load = load
        self._why_lost = why_lost
        self._result: T | None = None
        self._error: BaseException | None = None
        self._num_threads = 1
        self._thread = threading.Thread(target=self._run, name="ranks-loader", daemon=True)
        self._thread.start()

    def wait(self, meanwhile: Callable[[], None] = lambda: None) -> T:
        """The result, or the error of ``load``. Raises ModelError if a rank is lost, though ``load`` may go on for a while.

        ``meanwhile`` is called several times a second.
        """
        while self._thread.is_alive() and self._why_lost() is None:
            self._thread.join(_LOOK_S)
            meanwhile()
        self._thread.join(_END_S)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise ModelError(self._why_lost())
        torch.set_num_threads(self._num_threads)  # a thread has its own number, and this one may compute steps
        assert self._result is not None, "a load that ended without an error has a result"
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._load()
            self._num_threads = torch.get_num_threads()
        except BaseException as error:
            self._error = error


def unless_lost(progress: Progress, why_lost: Callable[[], str | None]) -> Progress:
    """``progress``, which raises ModelError once a rank is lost. So whatever reports progress ends soon."""

    def heard(done: int, total: int) -> None:
        if (reason := why_lost()) is not None:
            raise ModelError(reason)
        progress(done, total)

    return heard


def wait_for_reason(why_lost: Callable[[], str | None], timeout_s: float) -> str | None:
    """Why a rank is lost, as soon as that is known; None if that is not known in time."""
    until_s = time.monotonic() + timeout_s
    while (reason := why_lost()) is None and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
    return reason
