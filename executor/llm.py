"""The executor's main class: a model in this process."""

from __future__ import annotations

import concurrent.futures
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, cast

from kvrelay.common.settings import build
from kvrelay.executor.batch import OnProgress, run_batch
from kvrelay.executor.errors import ShutDownError
from kvrelay.executor.executor import Executor, Stats
from kvrelay.executor.local import LocalBackend, LocalSettings
from kvrelay.executor.outputs import RequestOutput
from kvrelay.executor.request import Chat, Prompt, Request, as_request, wrong_prompt
from kvrelay.executor.result import GenerationResult
from kvrelay.executor.sampling import SamplingParams
from kvrelay.gateway.errors import InvalidRequestError

_AT_EXIT_S = 10.0  # how long the interpreter's exit waits for a running step
_MORE_AT_A_TIME = 8  # submitted requests beyond those that run, so that the worker's batch has no gaps


class LLM:
    """A model in this process. Use it as a context manager, or call :meth:`shutdown`. All methods may be called from any thread.

        LLM("demo", max_num_seqs=16, kv_memory_mb=512)

    Names are those of vLLM's ``LLM`` and TensorRT-LLM's where those agree.
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        """Blocks until requests can be served; loading a model takes seconds.

        ``model``: a directory, a Hugging Face id or ``demo``. ``options``: settings by name (``dtype``, ``kv_memory_mb``,
        ``max_num_seqs``, ``threads``, ``max_queued`` …; see :class:`kvrelay.executor.local.LocalSettings`). Raises SettingsError or
        ModelError.
        """
        settings = build(LocalSettings, {"model": model, **options}, source="LLM")
        backend = LocalBackend.load(settings)
        self._max_at_a_time = backend.max_num_seqs + _MORE_AT_A_TIME
        self._executor = Executor(backend)
        # Also runs at the interpreter's exit, and when this object is garbage-collected (results keep it alive).
        self._finalizer = weakref.finalize(self, self._executor.shutdown, _AT_EXIT_S)
        self._executor.start()

    def submit(
        self, prompt: Prompt | Request, sampling_params: SamplingParams | None = None, *, stream: bool = False
    ) -> GenerationResult:
        """Begin a request; returns at once. The result raises errors.

        ``stream``: the result's iterators see every step, not only the end. Raises InvalidRequestError if the prompt has a wrong
        type.
        """
        submitted = self._executor.submit(as_request(prompt, sampling_params), stream=stream)

        def abort() -> None:
            self._executor.abort(submitted)

        return GenerationResult(submitted.progress, abort)

    def generate(
        self,
        prompts: Prompt | Request | Sequence[Prompt | Request],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_progress: OnProgress = lambda done, total: None,
    ) -> list[RequestOutput]:
        """The outputs of all prompts, in their order. Blocks. There may be any number of prompts; as many run at a time as there is
        room for.

        ``sampling_params``: for all, or one for each. ``on_progress``: called with (complete, all). Raises the first ApiError,
        after aborting all other requests.
        """
        if not isinstance(prompts, Iterable | Chat | Request):
            raise wrong_prompt(prompts)
        given: list[Any] = [prompts] if _is_one(prompts) else list(cast("Sequence[Any]", prompts))
        is_list = isinstance(sampling_params, list | tuple)
        params: list[Any] = list(cast("Any", sampling_params)) if is_list else [sampling_params] * len(given)
        if len(params) != len(given):
            raise InvalidRequestError(
                f"{len(params)} sampling_params are given for {len(given)} prompts; give one for all, or one each",
                param="sampling_params",
            )
        requests = [as_request(prompt, its) for prompt, its in zip(given, params, strict=True)]
        return run_batch(requests, self.submit, max_at_a_time=self._max_at_a_time, on_progress=on_progress)

    def get_stats(self) -> Stats:
        """The current load: ``num_running``, ``num_waiting``, ``num_used_blocks``, ``num_free_blocks`` (including cached ones),
        ``num_prompt_tokens``, ``num_output_tokens`` so far. Blocks briefly. Raises ApiError.
        """
        try:
            return self._executor.stats().result()
        except concurrent.futures.CancelledError:
            raise ShutDownError from None

    def shutdown(self) -> None:
        """Shut down: open requests fail with ShutDownError. Waits for threads and sockets. May be called more than once."""
        self._executor.shutdown()
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def _is_one(prompts: object) -> bool:
    """Whether this is one prompt. A list of numbers is one prompt."""
    if isinstance(prompts, str | bytes | Mapping | Chat | Request):
        return True
    return (
        isinstance(prompts, Sequence) and bool(prompts) and not isinstance(prompts[0], str | Sequence | Chat | Request)
    )
