"""A million frames at the decoder, the control servers of both workers and the block receiver; every one from a seed.

Nothing may be raised but what is documented; the books must balance after every batch; no lease is verified whose memory is not
what the honest sender computed; honest hand-offs in between get the right bytes and tokens; memory does not grow.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .figures import run_all
from .findings import run_batches
from .fuzz_blocks import BlockFuzz
from .fuzz_control import DecodeFuzz, PrefillFuzz
from .fuzz_decoder import fuzz_decoder

# Of all frames.
_SHARES = {"decoder": 0.4, "decode worker": 0.2, "prefill worker": 0.2, "plain blocks": 0.1, "sealed blocks": 0.1}


def runs(seed: int, num_frames: int) -> list[tuple[str, Callable[[], str]]]:
    """One run per target: what it is called, and what runs it and returns its figures."""

    def rng(name: str) -> random.Random:
        return random.Random(f"{seed} {name}")

    def decoder() -> str:
        numbers = rng("decoder")
        return run_batches(lambda: fuzz_decoder(numbers, 10_000), round(num_frames * _SHARES["decoder"]))

    def worker(name: str, make: Callable[[random.Random], DecodeFuzz | PrefillFuzz]) -> str:
        fuzz = make(rng(name))
        try:
            figures = run_batches(fuzz.batch, round(num_frames * _SHARES[name]))
            fuzz.findings.check()
        finally:
            fuzz.rig.close()
        return f"{figures}; {fuzz.number} prompts"

    def blocks(name: str) -> str:
        fuzz = BlockFuzz(rng(name), is_sealed=name.startswith("sealed"))
        try:
            figures = run_batches(fuzz.batch, round(num_frames * _SHARES[name]))
            fuzz.findings.check()
        finally:
            fuzz.close()
        return f"{figures}; {fuzz.told()}"

    return [
        ("decoder", decoder),
        ("decode worker", lambda: worker("decode worker", DecodeFuzz)),
        ("prefill worker", lambda: worker("prefill worker", PrefillFuzz)),
        ("plain blocks", lambda: blocks("plain blocks")),
        ("sealed blocks", lambda: blocks("sealed blocks")),
    ]


@contextmanager
def without_logs() -> Iterator[None]:
    """Strangers are logged, once each; here they are all there is."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def main() -> int:
    """See the module; prints one line per target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=struct.unpack("<I", os.urandom(4))[0])
    parser.add_argument("--frames", type=int, default=3_000_000)
    given = parser.parse_args()
    sys.stdout.write(f"fuzz_wire: seed {given.seed}, {given.frames} frames\n")
    with without_logs():
        return run_all(runs(given.seed, given.frames))


if __name__ == "__main__":
    sys.exit(main())
