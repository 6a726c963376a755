"""Compiles guides, off the model loop and off the asyncio loop, each once.

A process (:mod:`kvrelay.engine.guide_process`) makes a grammar of a guide and tries it. What comes back is the grammar's text:
from that, a sequence's state is made in about a millisecond. Texts and refusals are kept, the least recently used go first.
Guides that are equal and in flight are compiled once. One process starts with the compiler, a second one when two guides come
at once.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import LifoQueue

import numpy as np

from kvrelay.common.sampling import Guide, SamplingParams
from kvrelay.engine.guidance import GuideRefusal, GuideResult
from kvrelay.engine.guide_child import GuideLimits, GuideProcess, GuideProcessError
from kvrelay.engine.guide_state import GrammarState
from kvrelay.engine.guide_vocabulary import load_vocabulary

logger = logging.getLogger(__name__)

_NUM_PROCESSES = 2  # so that one bad guide at a time is in nobody's way
_NUM_MASK_THREADS = 2  # for the masks of slow grammars
_CACHE_BYTES = 2**26  # of guides and their grammars' texts
_MAX_DETAIL = 500

Compiled = str | GuideRefusal  # a grammar's text


class GrammarCompiler:
    """Implements :class:`kvrelay.engine.guidance.GuideCompiler` for one model. ``start`` from any thread."""

    def __init__(
        self, model_dir: Path, vocab_size: int, *, limits: GuideLimits | None = None, cache_bytes: int = _CACHE_BYTES
    ) -> None:
        """``vocab_size``: the width of the model's logits. Raises ModelError if the model's files have no vocabulary."""
        self._vocab_size = vocab_size
        self._vocabulary = load_vocabulary(model_dir, vocab_size)
        self._cache = _Cache(cache_bytes)
        self._lock = threading.Lock()
        self._in_flight: dict[Guide, Future[Compiled]] = {}
        self._is_closed = False
        self._threads = ThreadPoolExecutor(_NUM_PROCESSES, thread_name_prefix="guides")
        self._mask_threads = ThreadPoolExecutor(_NUM_MASK_THREADS, thread_name_prefix="guide-masks")
        limits = limits or GuideLimits()
        self._all = [GuideProcess(model_dir, vocab_size, limits) for _ in range(_NUM_PROCESSES)]
        self._idle: LifoQueue[GuideProcess] = LifoQueue()  # the last one used first: others need never start
        for process in self._all:
            self._idle.put(process)
        self._threads.submit(self._warm)

    def start(self, sampling: SamplingParams, output: Seq[int], done: Callable[[GuideResult], None]) -> None:
        """See GuideCompiler."""
        assert sampling.guide is not None, "who has no guide needs no compiler"
        tokens = list(output)

        def finish(future: Future[Compiled]) -> None:
            if not future.cancelled():
                done(self._state(future.result(), sampling, tokens))

        self._compiled(sampling.guide).add_done_callback(finish)

    def close(self) -> None:
        """See GuideCompiler."""
        with self._lock:
            self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._all:
            process.kill()
        self._threads.shutdown(wait=True)
        for process in self._all:
            process.close()
        self._mask_threads.shutdown(wait=True)

    def _compiled(self, guide: Guide) -> Future[Compiled]:
        with self._lock:
            known = self._cache.get(guide)
            if known is not None and not self._is_closed:
                # On a thread, although it is there: a long output is replayed by whoever has it.
                return self._threads.submit(lambda: known)
            future = self._in_flight.get(guide)
            if future is None and not self._is_closed:
                future = self._in_flight[guide] = self._threads.submit(self._compile, guide)
            if future is None:
                future = Future()
                future.cancel()
            return future

    def _warm(self) -> None:
        """Start a process before the first guide comes."""
        process = self._idle.get_nowait()
        try:
            process.start()
        except GuideProcessError:
            if not self._is_closed:  # else it was ended while it started
                logger.exception("guides cannot be compiled here")
        finally:
            self._idle.put(process)

    def _compile(self, guide: Guide) -> Compiled:
        process = self._idle.get_nowait()  # there are as many as threads
        is_known = True
        try:
            answer = process.compile(guide)
            compiled: Compiled = GuideRefusal(_detail(answer.error)) if answer.error else answer.grammar
        except Exception as error:
            is_known = False
            if not isinstance(error, GuideProcessError):
                logger.exception("a guide could not be compiled")
            compiled = GuideRefusal(f"the guide could not be compiled: {error}"[:_MAX_DETAIL], is_invalid=False)
        finally:
            self._idle.put(process)
        with self._lock:
            if is_known:
                self._cache.put(guide, compiled)
            self._in_flight.pop(guide, None)
        return compiled

    def _state(self, compiled: Compiled, sampling: SamplingParams, output: list[int]) -> GuideResult:
        if isinstance(compiled, GuideRefusal):
            return compiled
        # A model's list of them may name tokens that it has no logits for.
        stops = [token_id for token_id in sampling.stop_token_ids if 0 <= token_id < self._vocab_size]
        try:
            state = GrammarState(self._vocabulary, compiled, stops, self._mask_threads)
            for position, token_id in enumerate(output):
                try:
                    state.accept(token_id)
                except ValueError as error:
                    return GuideRefusal(f"the output so far does not match the guide at its token {position}: {error}")
            state.fill(np.empty(state.num_words, dtype=np.int32))  # the first mask takes longest
        except Exception as error:
            logger.exception("a guide's state could not be made")
            return GuideRefusal(_detail(f"the guide cannot be followed: {error}"), is_invalid=False)
        return state


class _Cache:
    """Grammars and refusals by guide; the least recently used go first. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[Guide, tuple[Compiled, int]] = OrderedDict()

    def get(self, guide: Guide) -> Compiled | None:
        if guide not in self._entries:
            return None
        self._entries.move_to_end(guide)
        return self._entries[guide][0]

    def put(self, guide: Guide, compiled: Compiled) -> None:
        size = 4 * (len(guide.text) + len(compiled.detail if isinstance(compiled, GuideRefusal) else compiled))
        if guide in self._entries:
            self._num_bytes -= self._entries.pop(guide)[1]
        self._entries[guide] = compiled, size
        self._num_bytes += size
        while self._num_bytes > self._max_bytes and len(self._entries) > 1:
            self._num_bytes -= self._entries.popitem(last=False)[1][1]


def _detail(error: str) -> str:
    """The reason alone: whoever tells it knows which field cannot be followed."""
    return error if len(error) <= _MAX_DETAIL else error[: _MAX_DETAIL - 1] + "…"
