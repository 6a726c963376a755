"""The process that compiles grammars for one worker: ``python -m kvrelay.engine.guides.process MODEL_DIR VOCAB_SIZE``.

A grammar is a program from a stranger. Some take minutes or gigabytes to compile, or break the compiler; here that ends this
process and not the worker. Requests come on standard input, answers leave on standard output, each a line of
JSON. A process is ready once it has sent an empty :class:`Answer`. It ends when its input does.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
from pathlib import Path
from typing import IO

import llguidance
import msgspec
import numpy as np

from kvrelay.common.sampling import Guide
from kvrelay.engine.guides.errors import UnsupportedGuideError
from kvrelay.engine.guides.grammar import lark_of
from kvrelay.engine.guides.state import GrammarState
from kvrelay.engine.guides.vocabulary import load_vocabulary, special_ids

_MEMORY_BYTES = 2**31  # on top of what the process has when it is ready
_PROBE_STEPS = 24  # tokens of one output, at random, that a new grammar is tried with
_PLACE = re.compile(r"^(at )?\d+\(\d+\): |\n +\d+ \|.*", re.DOTALL)  # in our text, which the client does not know


class Request(msgspec.Struct, frozen=True):
    """Compile this, in so much time of the CPU."""

    guide: Guide
    cpu_s: float


class Answer(msgspec.Struct, frozen=True):
    """The guide's grammar in Lark, or what is wrong with the guide."""

    grammar: str = ""
    error: str = ""


def main(model_dir: str, vocab_size: str) -> None:
    """Serve until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker, which closes the input
    os.nice(5)  # who generates comes before who begins
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whoever prints must not break the stream of answers
    vocabulary = load_vocabulary(Path(model_dir), int(vocab_size))
    specials = special_ids(vocabulary)
    _write(answers, Answer())
    limit = _data_bytes() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=Request)
        signal.setitimer(signal.ITIMER_PROF, request.cpu_s)  # its signal ends the process, wherever it is
        answer = _compiled(request.guide, vocabulary, specials)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answers, answer)


def _write(stream: IO[bytes], answer: Answer) -> None:
    stream.write(msgspec.json.encode(answer) + b"\n")
    stream.flush()


def _compiled(guide: Guide, vocabulary: llguidance.LLTokenizer, specials: dict[str, int]) -> Answer:
    try:
        grammar = lark_of(guide, specials)
        trouble = _probe(GrammarState(vocabulary, grammar, ()))
    except MemoryError:
        return Answer(error=f"it takes more than {_MEMORY_BYTES >> 20} MiB to compile: make it simpler")
    except (UnsupportedGuideError, RecursionError, ValueError) as error:
        trouble = " ".join(_PLACE.sub("", str(error)).split()) or type(error).__name__
    return Answer(error=trouble) if trouble else Answer(grammar)


def _probe(state: GrammarState) -> str | None:
    """What is wrong with the guide, as far as an output at random shows it: it allows nothing, or is too ambiguous."""
    mask = np.zeros(state.num_words, dtype=np.int32)
    random = np.random.default_rng(0)
    for _ in range(_PROBE_STEPS):
        state.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if state.trouble is not None or not len(allowed):
            return state.trouble
        state.accept(int(random.choice(allowed)))
        if state.is_complete:
            break
    return None


def _data_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["VmData"].split()[0]) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
