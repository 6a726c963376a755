"""The executor's one class: a model in this process, or a cluster at an address, behind the same methods."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, cast

from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import build, describe
from kvrelay.executor.backend import Backend, Stats
from kvrelay.executor.batch import OnProgress, run_batch
from kvrelay.executor.errors import ShutDownError
from kvrelay.executor.executor import Executor
from kvrelay.executor.outputs import RequestOutput
from kvrelay.executor.request import Chat, Message, Prompt, Request, as_request
from kvrelay.executor.result import GenerationResult
from kvrelay.executor.sampling import SamplingParams
from kvrelay.gateway.errors import InvalidRequestError

_AT_EXIT_S = 10.0  # how long the interpreter's end waits for a step that runs
_MORE_AT_A_TIME = 8  # requests of a batch than run: so the worker's batch has no gaps
_AT_A_TIME_REMOTE = 256


class LLM:
    """Use it as a context manager, or call :meth:`shutdown`. All methods may be called from any thread and any asyncio loop.

        LLM("demo", max_num_seqs=16, kv_memory_mb=512)      a model in this process
        LLM(address="http://gateway:8000", api_key="…")     a cluster

    Names are those of vLLM's ``LLM`` and TensorRT-LLM's where they agree.
    """

    def __init__(
        self, model: str | None = None, *, address: str | None = None, api_key: str | None = None, **options: Any
    ) -> None:
        """Blocks until requests can be served; loading a model takes seconds.

        ``model``: a directory, a Hugging Face id or ``demo`` (the default); at an address the name that it must be served by, if
        any. ``options``: settings by their names (``dtype``, ``kv_memory_mb``, ``max_num_seqs``, ``threads``, ``max_queued`` …; see
        :mod:`kvrelay.executor.settings`).

        Raises SettingsError or ModelError; ApiError if nobody answers at the address.
        """
        backend: Backend
        if address is None:
            if api_key is not None:
                raise SettingsError("api_key is given without an address; a model in this process has no keys")
            backend, self._max_at_a_time = _local(model or "demo", options)
        else:
            backend, self._max_at_a_time = _remote(address, model, api_key, options)
        self._executor = Executor(backend)
        # Also at the interpreter's exit, and when nobody knows this object any more (results do).
        self._finalizer = weakref.finalize(self, self._executor.shutdown, _AT_EXIT_S)
        self._executor.start()

    def submit(
        self, prompt: Prompt | Request, sampling_params: SamplingParams | None = None, *, stream: bool = False
    ) -> GenerationResult:
        """Begin a request; returns at once. What goes wrong comes out of the result.

        ``stream``: its iterators see every step, not just the end. Raises InvalidRequestError on a prompt that is none.
        """
        submitted = self._executor.submit(as_request(prompt, sampling_params), stream=stream)

        def abort() -> None:
            self._executor.abort(submitted)

        return GenerationResult(submitted.progress, abort)

    def generate_async(
        self, inputs: Prompt | Request, sampling_params: SamplingParams | None = None, streaming: bool = False
    ) -> GenerationResult:
        """As :meth:`submit`, in TensorRT-LLM's words. (No coroutine; the result is awaitable.)"""
        return self.submit(inputs, sampling_params, stream=streaming)

    def generate(
        self,
        prompts: Prompt | Request | Sequence[Prompt | Request],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | OnProgress = False,
    ) -> list[RequestOutput]:
        """The outputs of all prompts, in their order. Blocks; any number is taken, as many run at a time as find room.

        ``sampling_params``: of all, or of each. ``use_tqdm``: a progress bar on stderr, or what hears (complete, all). Raises the
        first ApiError, after all others were aborted.
        """
        given: list[Any] = [prompts] if _is_one(prompts) else list(cast("Sequence[Any]", prompts))
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params: list[SamplingParams | None] = [sampling_params] * len(given)
        else:
            params = list(sampling_params)
        if len(params) != len(given):
            raise InvalidRequestError(
                f"{len(params)} sampling_params are given for {len(given)} prompts; give one for all, or one each",
                param="sampling_params",
            )
        requests = [as_request(prompt, its) for prompt, its in zip(given, params, strict=True)]
        with _shown(use_tqdm, len(requests)) as on_progress:
            return run_batch(requests, self.submit, max_at_a_time=self._max_at_a_time, on_progress=on_progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | OnProgress = False,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """As :meth:`generate`, of one conversation or several. Texts are as the model writes them, with tool calls and thoughts.

        To submit a chat, give :meth:`submit` a :class:`kvrelay.executor.Chat`.
        """
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        chats = [
            Chat(one, tools, add_generation_prompt, continue_final_message, chat_template_kwargs)
            for one in conversations
        ]
        return self.generate(chats, sampling_params, use_tqdm)

    def get_stats(self) -> Stats:
        """How busy it is: ``num_running``, ``num_waiting``, ``num_used_blocks``, ``num_free_blocks`` (cached ones among them),
        ``num_prompt_tokens``, ``num_output_tokens`` so far.

        In this process as things are now; of a cluster, what its gateway knows: all of its clients' requests, and blocks as its
        workers last reported them. Blocks for a moment. Raises ApiError.
        """
        try:
            return self._executor.stats().result()
        except concurrent.futures.CancelledError:
            raise ShutDownError from None

    async def aget_stats(self) -> Stats:
        """As :meth:`get_stats`, awaited."""
        future = self._executor.stats()
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if future.cancelled() and not _is_cancelled():
                raise ShutDownError from None
            raise

    def shutdown(self) -> None:
        """End it: requests that are not over fail with ShutDownError. Waits for threads and sockets. May come more than once."""
        self._executor.shutdown()
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def _local(model: str, options: Mapping[str, Any]) -> tuple[Backend, int]:
    """A loaded model, and how many requests of a batch it gets at a time."""
    from kvrelay.executor.local import LocalBackend  # noqa: PLC0415 - a client of an address has neither torch nor a tokenizer
    from kvrelay.executor.settings import LocalSettings  # noqa: PLC0415

    settings = build(LocalSettings, {"model": model, **options}, source="LLM")
    return LocalBackend.load(settings), settings.scheduler.max_num_seqs + _MORE_AT_A_TIME


def _remote(address: str, model: str | None, api_key: str | None, options: Mapping[str, Any]) -> tuple[Backend, int]:
    from kvrelay.executor.connections import RemoteSettings  # noqa: PLC0415
    from kvrelay.executor.remote import RemoteBackend  # noqa: PLC0415 - whoever has the model here needs no HTTP

    known = {info.name for info in describe(RemoteSettings)}
    if foreign := sorted(set(options) - known):
        raise SettingsError(
            f"LLM: {', '.join(foreign)} cannot be set with an address, where the cluster has its own settings; "
            f"known are: {', '.join(sorted(known))}"
        )
    settings = build(RemoteSettings, options, source="LLM")
    return RemoteBackend(address, model, api_key, settings), min(_AT_A_TIME_REMOTE, settings.max_connections)


def _is_one(prompts: object) -> bool:
    """Whether it is one prompt, and not several. A list of numbers is one."""
    if isinstance(prompts, str | Mapping | Chat | Request):
        return True
    return (
        isinstance(prompts, Sequence)
        and bool(prompts)
        and not isinstance(prompts[0], str | Sequence | Mapping | Chat | Request)
    )


def _is_cancelled() -> bool:
    """Whether somebody cancelled the task that runs."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@contextlib.contextmanager
def _shown(use_tqdm: bool | Callable[[int, int], None], total: int) -> Iterator[OnProgress]:
    """Who hears of a batch's progress."""
    if callable(use_tqdm):
        yield use_tqdm
        return
    if not use_tqdm:
        yield lambda done, total: None
        return
    from rich.console import Console  # noqa: PLC0415 - only who wants to see a bar
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=Console(stderr=True)) as bars:
        bar = bars.add_task("Processed prompts", total=total)
        yield lambda done, total: bars.update(bar, completed=done)
