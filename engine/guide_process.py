"""The process that compiles grammars for one worker: ``python -m kvrelay.engine.guide_process MODEL_DIR VOCAB_SIZE``.

A grammar is a program from a stranger. Some take minutes or gigabytes to compile, or break the compiler; here that ends this
process and not the worker. Requests come on standard input, answers leave on standard output, each a length (4 bytes,
little-endian) and a msgpack struct. A process is ready once it has sent an empty :class:`Answer`. It ends when its input does.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import xgrammar as xgr

from kvrelay.common.sampling import Guide
from kvrelay.engine.guide_errors import UnsupportedGuideError
from kvrelay.engine.guide_grammar import compile_guide, regular_automaton
from kvrelay.engine.guide_regular import RegularGuide, RegularState, TokenTree, make_regular_guide
from kvrelay.engine.guide_state import MAX_FILL_S, XGrammarState
from kvrelay.engine.guide_vocabulary import load_vocabulary

_MEMORY_BYTES = 2**31  # on top of what the process has when it is ready
_PROBE_STEPS = 24  # tokens of one output, at random, that a new grammar is tried with
_NUM_HEADER = 4
_SOURCE_PLACE = re.compile(
    r"\[\d\d:\d\d:\d\d\] \S+:\d+: (Check failed: .*? is false: )?"
)  # where xgrammar raised its error


class Request(msgspec.Struct, frozen=True):
    """Compile this, in so much time of the CPU."""

    guide: Guide
    cpu_s: float
    max_bytes: int  # of the answer


class Answer(msgspec.Struct, frozen=True):
    """The compiled guide, or what is wrong with it."""

    grammar: bytes = b""  # as xgrammar serializes it
    regular: bytes = b""  # a RegularGuide instead
    error: str = ""


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next frame; None at the end of the stream."""
    header = stream.read(_NUM_HEADER)
    size = int.from_bytes(header, "little")
    frame = stream.read(size)
    return frame if len(header) == _NUM_HEADER and len(frame) == size else None


def write_frame(stream: IO[bytes], frame: bytes) -> None:
    """Send a frame."""
    stream.write(len(frame).to_bytes(_NUM_HEADER, "little"))
    stream.write(frame)
    stream.flush()


def tokenizer_info(vocabulary: list[bytes], end_token: int) -> xgr.TokenizerInfo:
    """The same on both sides: a grammar fits the tokens that it was compiled for."""
    return xgr.TokenizerInfo(vocabulary, xgr.VocabType.RAW, vocab_size=len(vocabulary), stop_token_ids=[end_token])


def main(model_dir: str, vocab_size: str) -> None:
    """Serve until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker, which closes the input
    os.nice(5)  # who generates comes before who begins
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whoever prints must not break the stream of answers
    vocabulary, end_token = load_vocabulary(Path(model_dir), int(vocab_size))
    compiler = _Compiler(vocabulary, end_token)
    write_frame(answers, msgspec.msgpack.encode(Answer()))
    limit = _data_bytes() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    decoder = msgspec.msgpack.Decoder(Request)
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        request = decoder.decode(frame)
        signal.setitimer(signal.ITIMER_PROF, request.cpu_s)  # its signal ends the process, wherever it is
        answer = compiler.compile(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(answers, msgspec.msgpack.encode(answer))


class _Compiler:
    """What the process has of its model."""

    def __init__(self, vocabulary: list[bytes], end_token: int) -> None:
        self._vocabulary = vocabulary
        self._tree = TokenTree.of(vocabulary)
        self._xgrammar = xgr.GrammarCompiler(tokenizer_info(vocabulary, end_token), max_threads=1, cache_enabled=False)

    def compile(self, request: Request) -> Answer:
        """The answer to a request."""
        with _Stderr() as stderr:
            try:
                compiled = self._compiled(request.guide)
            except MemoryError:
                return Answer(error=f"it takes more than {_MEMORY_BYTES >> 20} MiB to compile: make it simpler")
            except (UnsupportedGuideError, RuntimeError, ValueError, TypeError) as error:
                return Answer(error=_SOURCE_PLACE.sub("", str(error)).strip() or type(error).__name__)
        # xgrammar warns where it leaves something out that it cannot do. The output would not be what was asked for.
        if warnings := [line for line in stderr.text.splitlines() if "arning:" in line]:
            return Answer(error=warnings[0].partition("arning:")[2].strip())
        state: XGrammarState | RegularState
        if isinstance(compiled, RegularGuide):
            answer = Answer(regular=compiled.to_bytes())
            state = RegularState(compiled, self._vocabulary, ())
        else:
            answer = Answer(grammar=compiled.serialize_json().encode())
            state = XGrammarState(compiled, (), len(self._vocabulary))
        if (size := len(answer.grammar) + len(answer.regular)) > request.max_bytes:
            return Answer(error=f"its grammar takes {size} bytes, more than {request.max_bytes}: make it simpler")
        trouble = _probe(state, len(self._vocabulary))
        return Answer(error=trouble) if trouble else answer

    def _compiled(self, guide: Guide) -> RegularGuide | xgr.CompiledGrammar:
        automaton = regular_automaton(guide.kind, guide.text)
        regular = None if automaton is None else make_regular_guide(automaton, self._tree)
        return regular or compile_guide(self._xgrammar, guide.kind, guide.text)


def _probe(state: XGrammarState | RegularState, vocab_size: int) -> str | None:
    """What is wrong with the guide, as far as an output at random shows it: it allows nothing, or takes too long."""
    mask = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    random = np.random.default_rng(0)
    for _ in range(_PROBE_STEPS):
        start_s = time.thread_time()
        state.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if state.trouble is not None or not len(allowed):
            return state.trouble
        state.accept(int(random.choice(allowed)))
        if time.thread_time() - start_s > MAX_FILL_S:
            return f"it takes more than {MAX_FILL_S} s to say which tokens may come next: it is too ambiguous; make it simpler"
        if state.is_complete:
            break
    return None


class _Stderr:
    """What is written to file descriptor 2 meanwhile, by whatever code: ``text`` afterwards."""

    def __enter__(self) -> _Stderr:
        self._saved = os.dup(2)
        self._file = tempfile.TemporaryFile()
        os.dup2(self._file.fileno(), 2)
        return self

    def __exit__(self, *_: object) -> None:
        os.dup2(self._saved, 2)
        os.close(self._saved)
        self._file.seek(0)
        self.text = self._file.read().decode(errors="replace")
        self._file.close()


def _data_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["VmData"].split()[0]) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
