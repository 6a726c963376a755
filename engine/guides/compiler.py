"""Compiles guides, each once, outside of the model thread and the asyncio loop.

A compiler gets ready on a thread. The worker is ready before that, and a guide waits for the rest at most. A process
(:mod:`kvrelay.engine.guides.process`) makes a grammar of a guide and tries it. It returns the grammar's text, from which a
sequence's state is made in about a millisecond. Texts and refusals are cached, and the least recently used are dropped first. Equal
guides that are being compiled share one compilation. One process starts with the compiler, and a second one when two guides come at
once.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import LifoQueue

import numpy as np

from kvrelay.common.sampling import Guide, SamplingParams
from kvrelay.engine.guides.child import GuideLimits, GuideProcess, GuideProcessError
from kvrelay.engine.guides.guidance import GuideRefusal, GuideResult
from kvrelay.engine.guides.state import GrammarState
from kvrelay.engine.guides.vocabulary import load_vocabulary

logger = logging.getLogger(__name__)

_NUM_PROCESSES = 2  # so that one bad guide does not delay all others
_NUM_STATE_THREADS = 2  # of their own, so that a compiled guide does not wait for others' compilations
_NUM_MASK_THREADS = 2  # threads for the masks of slow grammars
_MAX_KNOWN_LEN = 2**23  # cached characters of guides and grammars
_ENTRY_LEN = 1000  # counted in addition for each entry
_MAX_DETAIL = 500

Compiled = str | GuideRefusal  # a grammar's text, or a refusal


@dataclass(slots=True)
class _Known:
    future: Future[Compiled]
    num_chars: int  # of the guide and, once it is there, of the grammar


class GrammarCompiler:
    """Implements :class:`kvrelay.engine.guides.guidance.GuideCompiler` for one model. Call ``start`` from any thread."""

    def __init__(self, model_dir: Path, vocab_size: int, *, limits: GuideLimits | None = None) -> None:
        """``vocab_size``: the width of the model's logits. If the model's files have no vocabulary, all guides are refused."""
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        # Least recently used first; includes running compilations.
        self._known: OrderedDict[Guide, _Known] = OrderedDict()
        self._known_len = 0
        self._is_closed = False
        self._threads = ThreadPoolExecutor(_NUM_PROCESSES, thread_name_prefix="guides")
        self._state_threads = ThreadPoolExecutor(_NUM_STATE_THREADS, thread_name_prefix="guide-states")
        self._mask_threads = ThreadPoolExecutor(_NUM_MASK_THREADS, thread_name_prefix="guide-masks")
        self._vocabulary = self._threads.submit(load_vocabulary, model_dir, vocab_size)
        limits = limits or GuideLimits()
        self._all = [GuideProcess(model_dir, vocab_size, limits) for _ in range(_NUM_PROCESSES)]
        self._idle: LifoQueue[GuideProcess] = LifoQueue()  # last used first, so that the others need not start
        for process in self._all:
            self._idle.put(process)
        self._threads.submit(self._warm)

    def start(self, sampling: SamplingParams, output: Seq[int], done: Callable[[GuideResult], None]) -> None:
        """See GuideCompiler."""
        assert sampling.guide is not None, "who has no guide needs no compiler"
        tokens = list(output)

        def finish(future: Future[Compiled]) -> None:
            # On a thread, because replaying a long output takes time.
            with self._lock:
                if not self._is_closed:
                    self._state_threads.submit(lambda: done(self._state(future.result(), sampling, tokens)))

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
        self._state_threads.shutdown(wait=True, cancel_futures=True)
        self._mask_threads.shutdown(wait=True)

    def _compiled(self, guide: Guide) -> Future[Compiled]:
        """The guide's grammar, perhaps still being compiled. Call with the lock held."""
        if guide in self._known:
            self._known.move_to_end(guide)
            return self._known[guide].future
        future = self._threads.submit(self._compile, guide)
        self._known[guide] = _Known(future, 0)
        self._count(guide, len(guide.text) + _ENTRY_LEN)
        return future

    def _count(self, guide: Guide, num_chars: int) -> None:
        """Count characters that are kept for a guide, and forget others for them. Call with the lock held."""
        if (known := self._known.get(guide)) is None:
            return
        known.num_chars += num_chars
        self._known_len += num_chars
        while self._known_len > _MAX_KNOWN_LEN and len(self._known) > 1:
            self._forget(next(iter(self._known)))

    def _forget(self, guide: Guide) -> None:
        if (known := self._known.pop(guide, None)) is not None:
            self._known_len -= known.num_chars

    def _warm(self) -> None:
        """Start a process before the first guide arrives."""
        if (error := self._vocabulary.exception()) is not None:
            logger.error("guides cannot be compiled here", exc_info=error)
            return
        process = self._idle.get_nowait()
        try:
            process.start()
        except GuideProcessError:
            if not self._is_closed:  # otherwise it was ended during its start
                logger.exception("guides cannot be compiled here")
        finally:
            self._idle.put(process)

    def _compile(self, guide: Guide) -> Compiled:
        if (error := self._vocabulary.exception()) is not None:
            return GuideRefusal(_detail(f"this worker follows no guides: {error}"))
        process = self._idle.get_nowait()  # there are as many processes as threads
        try:
            answer = process.compile(guide)
            with self._lock:
                self._count(guide, len(answer.grammar))
            return GuideRefusal(_detail(answer.error)) if answer.error else answer.grammar
        except Exception as error:
            with self._lock:
                self._forget(guide)  # another try may succeed
            if not isinstance(error, GuideProcessError):
                logger.exception("a guide could not be compiled")
            return GuideRefusal(_detail(f"the guide could not be compiled: {error}"), is_invalid=False)
        finally:
            self._idle.put(process)

    def _state(self, compiled: Compiled, sampling: SamplingParams, output: list[int]) -> GuideResult:
        if isinstance(compiled, GuideRefusal):
            return compiled
        # A model's list of stop tokens may have ids without logits.
        stops = [token_id for token_id in sampling.stop_token_ids if 0 <= token_id < self._vocab_size]
        try:
            state = GrammarState(self._vocabulary.result(), compiled, stops, self._mask_threads)
            for position, token_id in enumerate(output):
                try:
                    state.accept(token_id)
                except ValueError as error:
                    return GuideRefusal(f"the output so far does not match the guide at its token {position}: {error}")
            state.fill(np.empty(state.num_words, dtype=np.int32))  # the first mask takes the longest
        except Exception as error:
            logger.exception("a guide's state could not be made")
            return GuideRefusal(_detail(f"the guide cannot be followed: {error}"), is_invalid=False)
        return state


def _detail(error: str) -> str:
    """The reason alone; the caller adds the field's name."""
    return error if len(error) <= _MAX_DETAIL else error[: _MAX_DETAIL - 1] + "…"
