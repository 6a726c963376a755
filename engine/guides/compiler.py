"""Compiles guides, off the model loop and off the asyncio loop, each once.

A compiler gets ready on a thread: a worker is ready before that, and a guide waits at most for the rest of it.

A process (:mod:`kvrelay.engine.guides.process`) makes a grammar of a guide and tries it. What comes back is the grammar's text:
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
from kvrelay.engine.guides.child import GuideLimits, GuideProcess, GuideProcessError
from kvrelay.engine.guides.guidance import GuideRefusal, GuideResult
from kvrelay.engine.guides.state import GrammarState
from kvrelay.engine.guides.vocabulary import load_vocabulary

logger = logging.getLogger(__name__)

_NUM_PROCESSES = 2  # so that one bad guide at a time is in nobody's way
_NUM_MASK_THREADS = 2  # for the masks of slow grammars
_MAX_KNOWN_LEN = 2**23  # characters of guides that are kept compiled …
_ENTRY_LEN = 1000  # … for each of which so many more count
_MAX_DETAIL = 500

Compiled = str | GuideRefusal  # a grammar's text


class GrammarCompiler:
    """Implements :class:`kvrelay.engine.guides.guidance.GuideCompiler` for one model. ``start`` from any thread."""

    def __init__(self, model_dir: Path, vocab_size: int, *, limits: GuideLimits | None = None) -> None:
        """``vocab_size``: the width of the model's logits. All guides are refused if the model's files have no vocabulary."""
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._known: OrderedDict[Guide, Future[Compiled]] = OrderedDict()  # the last used last; also what is under way
        self._known_len = 0
        self._is_closed = False
        self._threads = ThreadPoolExecutor(_NUM_PROCESSES, thread_name_prefix="guides")
        self._mask_threads = ThreadPoolExecutor(_NUM_MASK_THREADS, thread_name_prefix="guide-masks")
        self._vocabulary = self._threads.submit(load_vocabulary, model_dir, vocab_size)
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
            # On a thread, since a long output may be replayed.
            with self._lock:
                if not self._is_closed:
                    self._threads.submit(lambda: done(self._state(future.result(), sampling, tokens)))

        with self._lock:
            if self._is_closed:
                return
            future = self._compiled(sampling.guide)
        future.add_done_callback(finish)

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
        """The guide's grammar, which comes or is there already. Called with the lock held."""
        if guide in self._known:
            self._known.move_to_end(guide)
            return self._known[guide]
        future = self._known[guide] = self._threads.submit(self._compile, guide)
        self._known_len += len(guide.text) + _ENTRY_LEN
        while self._known_len > _MAX_KNOWN_LEN and len(self._known) > 1:
            self._forget(next(iter(self._known)))
        return future

    def _forget(self, guide: Guide) -> None:
        if self._known.pop(guide, None) is not None:
            self._known_len -= len(guide.text) + _ENTRY_LEN

    def _warm(self) -> None:
        """Start a process before the first guide comes."""
        if (error := self._vocabulary.exception()) is not None:
            logger.error("guides cannot be compiled here", exc_info=error)
            return
        process = self._idle.get_nowait()
        try:
            process.start()
        except GuideProcessError:
            if not self._is_closed:  # else it was ended while it started
                logger.exception("guides cannot be compiled here")
        finally:
            self._idle.put(process)

    def _compile(self, guide: Guide) -> Compiled:
        if (error := self._vocabulary.exception()) is not None:
            return GuideRefusal(_detail(f"this worker follows no guides: {error}"))
        process = self._idle.get_nowait()  # there are as many as threads
        try:
            answer = process.compile(guide)
            return GuideRefusal(_detail(answer.error)) if answer.error else answer.grammar
        except Exception as error:
            with self._lock:
                self._forget(guide)  # the next one may be luckier
            if not isinstance(error, GuideProcessError):
                logger.exception("a guide could not be compiled")
            return GuideRefusal(_detail(f"the guide could not be compiled: {error}"), is_invalid=False)
        finally:
            self._idle.put(process)

    def _state(self, compiled: Compiled, sampling: SamplingParams, output: list[int]) -> GuideResult:
        if isinstance(compiled, GuideRefusal):
            return compiled
        # A model's list of them may name tokens that it has no logits for.
        stops = [token_id for token_id in sampling.stop_token_ids if 0 <= token_id < self._vocab_size]
        try:
            state = GrammarState(self._vocabulary.result(), compiled, stops, self._mask_threads)
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


def _detail(error: str) -> str:
    """The reason alone: whoever tells it knows which field cannot be followed."""
    return error if len(error) <= _MAX_DETAIL else error[: _MAX_DETAIL - 1] + "…"
