"""Starts and shuts down executors over a fake engine in a process of its own, and fails if anything is left.

    python -P tests/executor/leaves_nothing.py MODEL_DIRECTORY

It needs its own process because other tests' threads may open and close sockets at any time. ``TMPDIR`` must be an empty directory.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import tempfile
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil

from kvrelay.common.settings import build
from kvrelay.engine.fake.engine import FakeEngine, fake_card
from kvrelay.engine.fake.language import expected_output
from kvrelay.executor.executor import Executor
from kvrelay.executor.local import LocalBackend, LocalSettings
from kvrelay.executor.request import Request
from kvrelay.executor.result import GenerationResult
from kvrelay.executor.sampling import SamplingParams

_VOCAB_SIZE = 512


def run(model: Path) -> None:
    """Start an executor, run eight requests, and shut it down."""
    engine = FakeEngine(fake_card(vocab_size=_VOCAB_SIZE, num_blocks=256))
    executor = Executor(LocalBackend(engine, model, build(LocalSettings, {"model": str(model)})))
    executor.start()
    assert os.listdir(tempfile.gettempdir()), "the sockets should lie here"
    assert not psutil.Process().net_connections("inet"), "a worker in this process needs no port"
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    submitted = {n: executor.submit(Request([1, 2, n + 1], greedy), stream=False) for n in range(8)}
    for n, one in submitted.items():
        output = GenerationResult(one.progress, lambda: None).result(60)
        assert output.outputs[0].token_ids == expected_output([1, 2, n + 1], 8, _VOCAB_SIZE)
    executor.shutdown()


def open_descriptors() -> Counter[str]:
    """Counts this process's open descriptors by target. Sockets and pipes count by kind, because their numbers differ."""
    leads_to: Counter[str] = Counter()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of this listing
            leads_to[re.sub(r"\[\d+\]", "", os.readlink(descriptor))] += 1
    return leads_to


def main(model: Path) -> None:
    """Run executors. Raises AssertionError that names what is left."""
    run(model)  # makes the things that a process makes once
    gc.collect()
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    for _ in range(3):
        run(model)
    gc.collect()
    assert set(threading.enumerate()) == threads, set(threading.enumerate()) ^ threads
    assert open_descriptors() == descriptors, (open_descriptors(), descriptors)
    assert not psutil.Process().children()
    assert not os.listdir(tempfile.gettempdir())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
