"""Errors of the executor. Results also raise those of the API unchanged (:mod:`kvrelay.gateway.errors`).

ApiError
├── WorkerDiedError      500  the worker in this process has ended; nothing can be computed any more
└── UnavailableError     503
    └── ShutDownError    503  the executor was shut down before the request was over
"""

from __future__ import annotations

from kvrelay.gateway.errors import ApiError, UnavailableError


class WorkerDiedError(ApiError):
    """The worker in this process has ended: make a new executor."""

    code = "worker_died"


class ShutDownError(UnavailableError):
    """The executor was shut down before the request was over."""

    code = "shut_down"

    def __init__(self) -> None:
        super().__init__("the executor was shut down before this request was over")
