"""The start of a decode worker: from the start of its process until ``/health/ready`` answers, with default settings.

The model was written or read by the same run, so it is in the page cache. CUDA graphs are included. The first start finds no
compiled kernel, like the first pod with a new cache. The second one finds the kernels of the first, like a pod whose cache is kept.
"""

from __future__ import annotations

import json
import queue
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from gpu_parts.engine.model_dir import model_directory
from gpu_parts.frame.rows import Against, Goal, Row, Unit
from gpu_parts.frame.running import Context, Finding, Note
from kvrelay.launcher.local.ports import free_ports
from kvrelay.launcher.local.process import Child, ComponentSpec
from kvrelay.launcher.local.supervisor import own_answer

_POLL_S = 0.05
_GRACE_S = 10.0  # from SIGTERM to SIGKILL
_TELLING_S = 3.0  # of the section's time, to say why a worker is not ready
_GOAL = Goal("≤ 20 s", Against.VALUE, 20.0)
# Each phase ends with the first log line of this form; what a device does not have is not there.
_PHASES = {
    "imports of the command": re.compile(r"loading .* of weights in"),
    "torch and weights": re.compile(r"read \d+ MB of weights in"),
    "largest step": re.compile(r"GPU memory: "),
    "other kernels": re.compile(r"capturing decode graphs: 1 of "),
    "graphs and sockets": re.compile(r"ready after "),
}

Line = tuple[float, str]  # the monotonic time of its arrival, and its text


def measure_starts(context: Context) -> Iterator[Finding]:
    """Start a worker twice with the same cache of compiled kernels, which is empty the first time."""
    directory = model_directory(context)
    _write_tokenizer(directory, context.sizes.shape.vocab_size)
    if context.device_type == "cuda":
        torch.cuda.empty_cache()  # a model that was drawn here leaves memory to the worker
    with tempfile.TemporaryDirectory(prefix="triton-", dir=context.work) as cache:
        for name, goals in (("an empty Triton cache", ()), ("a filled Triton cache", (_GOAL,))):
            seconds, lines = _start(context, directory, cache)
            yield Row(f"start of a decode worker, {name}", Unit.SECONDS, seconds, goals=goals, note=_phases_text(lines))
            yield Note(f"{context.remaining_s:.0f} s left")


def phases_of(lines: list[Line]) -> dict[str, float]:
    """The seconds of each phase that the log tells. The first of ``lines`` is the process's start, with any text."""
    found: dict[str, float] = {}
    before_s = lines[0][0]
    for phase, end in _PHASES.items():
        at_s = next((at_s for at_s, text in lines if end.search(text)), None)
        if at_s is not None:
            found[phase] = at_s - before_s
            before_s = at_s
    return found


def _phases_text(lines: list[Line]) -> str:
    return ", ".join(f"{phase} {took_s:.1f} s" for phase, took_s in phases_of(lines).items()) or "no phase ended"


def _start(context: Context, directory: Path, cache: str) -> tuple[float, list[Line]]:
    """Start a worker and end it. Returns the seconds until it was ready, and its log.

    Raises RuntimeError, with the phases so far, if it ends or is not ready in the section's time.
    """
    (admin_port,) = free_ports(1)
    ready_url = f"http://127.0.0.1:{admin_port}/health/ready"
    command = [sys.executable, "-P", "-m", "kvrelay.launcher", "decode-worker", "--model", str(directory)]
    command += ["--device", context.device_type, "--admin-port", str(admin_port), "--drain-s", "0"]
    command += ["--address", "tcp://127.0.0.1:*", "--data-address", "tcp://127.0.0.1:*"]
    if context.is_dry:
        command += ["--kv-memory-mb", "16", "--threads", "1"]
    spec = ComponentSpec("decode worker", tuple(command), ready_url, environment={"TRITON_CACHE_DIR": cache})
    heard: queue.SimpleQueue[Line] = queue.SimpleQueue()
    child = Child(spec, lambda _, text: heard.put((time.monotonic(), text)))

    def lines() -> list[Line]:
        return [(child.started_s, "started"), *(heard.get() for _ in range(heard.qsize()))]

    try:
        while own_answer(ready_url) is None:  # not listening yet, or not ready
            code, is_late = child.exit_code(), context.remaining_s < _TELLING_S
            if code is not None or is_late:
                how = "is not ready" if code is None else f"ended with {code}"
                raise RuntimeError(f"the worker {how} ({_phases_text(lines())}): {' / '.join(child.tail[-3:])}")
            time.sleep(_POLL_S)
        seconds = time.monotonic() - child.started_s
        _end(child)
    finally:
        child.kill()  # also one that is not ready, at once: while it loads it may not hear SIGTERM, and no time is left
    return seconds, lines()


def _end(child: Child) -> None:
    """Ask the process to stop, and wait: the next start needs its memory."""
    child.terminate()
    ends_s = time.monotonic() + _GRACE_S
    while child.exit_code() is None and time.monotonic() < ends_s:
        time.sleep(_POLL_S)


def _write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write a tokenizer with as many made-up words as the model has tokens: the command wants one."""
    vocab = {f"w{token}": token for token in range(vocab_size)}
    content = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
