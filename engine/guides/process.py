"""The process that compiles grammars for one worker: ``python -m kvrelay.engine.guides.process MODEL_DIR VOCAB_SIZE``.

A grammar is a program from an untrusted client. Some take minutes or gigabytes to compile, or crash the compiler. Here that ends
this process instead of the worker. Requests arrive on standard input and answers leave on standard output, each a line of JSON. The
process sends an empty :class:`Answer` when it is ready. It ends when its input does.
"""

from __future__ import annotations

import logging
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

logger = logging.getLogger(__name__)

_MEMORY_BYTES = 2**31  # in addition to the memory of the ready process
_PROBE_STEPS = 24  # length of the random output that a new grammar is tried with
# Positions in our grammar, which the client does not know.
_PLACE = re.compile(r"^(at )?\d+\(\d+\): |\n +\d+ \|.*", re.DOTALL)


class Request(msgspec.Struct, frozen=True):
    """Compile a guide within this CPU time."""

    guide: Guide
    cpu_s: float


class Answer(msgspec.Struct, frozen=True):
    """The guide's grammar in Lark, or why it was refused."""

    grammar: str = ""
    error: str = ""


def main(model_dir: str, vocab_size: str) -> None:
    """Serve until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker, which then closes our input
    os.nice(5)  # running requests have priority over new ones
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints must not get into the stream of answers
    vocabulary = load_vocabulary(Path(model_dir), int(vocab_size))
    specials = special_ids(vocabulary)
    _write(answers, Answer())
    limit = _data_bytes() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=Request)
        signal.setitimer(signal.ITIMER_PROF, request.cpu_s)  # its signal ends the process at any point
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
    except Exception as error:
        logger.exception("a guide could not be read")  # our mistake; other guides still compile here
        return Answer(error=f"it cannot be read: {type(error).__name__}")
    return Answer(error=trouble) if trouble else Answer(grammar)


def _probe(state: GrammarState) -> str | None:
    """Why a random output shows the guide to be unusable: it allows no token, or is too ambiguous. None if it shows nothing."""
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
