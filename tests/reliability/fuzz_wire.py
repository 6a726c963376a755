"""Fuzzes the control servers of both workers with a million frames, all from one seed.

Only documented exceptions may be raised, and the books must balance after every batch. A lease is only verified if its blocks hold
what an honest sender computes. Honest hand-offs in between get the right bytes and tokens, and memory does not grow.
:mod:`tests.reliability.test_lying_frames` fuzzes the frames of blocks by hypothesis.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import random
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .figures import run_all
from .findings import run_batches
from .fuzz_control import DecodeFuzz, PrefillFuzz

TARGETS: dict[str, Callable[[random.Random], DecodeFuzz | PrefillFuzz]] = {
    "decode worker": DecodeFuzz,
    "prefill worker": PrefillFuzz,
}


def fuzz(target: str, seed: int, num_frames: int) -> str:
    """Send frames to one of ``TARGETS``. Returns the figures. Raises AssertionError with all findings."""
    made = TARGETS[target](random.Random(f"{seed} {target}"))
    try:
        figures = run_batches(made.batch, num_frames)
        made.findings.check()
    finally:
        made.rig.close()
    return f"{figures}; {made.number} prompts"


@contextmanager
def without_logs() -> Iterator[None]:
    """Disable logs: workers log each refused peer, and here there are very many."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def main() -> int:
    """See the module. Prints one line per target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=struct.unpack("<I", os.urandom(4))[0])
    parser.add_argument("--frames", type=int, default=600_000, help="for each worker")
    given = parser.parse_args()
    sys.stdout.write(f"fuzz_wire: seed {given.seed}, {given.frames} frames each\n")
    with without_logs():
        return run_all([(target, functools.partial(fuzz, target, given.seed, given.frames)) for target in TARGETS])


if __name__ == "__main__":
    sys.exit(main())
