"""The compiler of guides around its processes: limits, caching, waiting, mistakes and closing."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay.common.sampling import Guide, GuideKind
from kvrelay.engine.guides.child import GuideLimits, GuideProcess, GuideProcessError
from kvrelay.engine.guides.compiler import GrammarCompiler
from kvrelay.engine.guides.guidance import GuideCompiler, GuideRefusal, GuideResult
from kvrelay.engine.guides.process import Answer
from tests.processes import started

from ..conftest import DEMO_VOCAB
from ..guided import compiled, refusal, sampling_of


def assert_compiles(compiler: GuideCompiler, regex: str) -> None:
    result = compiled(compiler, GuideKind.REGEX, regex)
    assert not isinstance(result, GuideRefusal), result.detail


def children() -> set[int]:
    """The compiling processes of this process."""
    return set(started("kvrelay.engine.guides.process"))


@pytest.fixture
def strict_compiler(demo_directory: Path) -> Iterator[Callable[[GuideLimits], GrammarCompiler]]:
    made: list[GrammarCompiler] = []

    def make(limits: GuideLimits) -> GrammarCompiler:
        made.append(GrammarCompiler(demo_directory, DEMO_VOCAB, limits=limits))
        return made[-1]

    yield make
    for compiler in made:
        compiler.close()


def test_what_takes_too_long_is_refused_and_the_next_guide_compiles(
    strict_compiler: Callable[[GuideLimits], GrammarCompiler],
) -> None:
    compiler = strict_compiler(GuideLimits(cpu_s=0.3))
    rules = "".join(f"a{number} ::= a{number + 1} a{number + 1}\n" for number in range(40))
    endless = f"root ::= a0 | [a-z] root [a-z]\n{rules}a40 ::= [a-z]{{1,9000}}"
    assert "more than 0.3 s to compile" in refusal(compiler, GuideKind.GRAMMAR, endless)
    assert_compiles(compiler, "a")


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (GuideKind.JSON_SCHEMA, '{"type": "string", "format": ["date"]}', "format is ['date']; it must be a name"),
        (
            GuideKind.STRUCTURAL_TAG,
            '{"format": {"type": "repeat", "min": 1, "max": 1e999, "content": {"type": "any_text"}}}',
            "it cannot be read: OverflowError",
        ),
    ],
)
def test_a_guide_that_cannot_be_read_is_refused_and_ends_no_process(
    guide_compiler: GrammarCompiler, kind: GuideKind, text: str, reason: str
) -> None:
    assert_compiles(guide_compiler, "a")  # a process has started
    before = children()
    assert reason in refusal(guide_compiler, kind, text)
    assert before <= children()


def test_each_guide_is_compiled_once(demo_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    compile_ = GuideProcess.compile

    def counting(process: GuideProcess, guide: Guide) -> Any:
        seen.append(guide.text)
        return compile_(process, guide)

    monkeypatch.setattr(GuideProcess, "compile", counting)
    compiler = GrammarCompiler(demo_directory, DEMO_VOCAB)
    try:
        answers: queue.SimpleQueue[GuideResult] = queue.SimpleQueue()
        for _ in range(5):  # all in flight at the same time
            for text in ("a+", "(b"):
                compiler.start(sampling_of(GuideKind.REGEX, text), (), answers.put)
        found = [answers.get(timeout=120) for _ in range(10)]
        assert sum(isinstance(one, GuideRefusal) for one in found) == 5
        compiled(compiler, GuideKind.REGEX, "a+")
        refusal(compiler, GuideKind.REGEX, "(b")
        assert sorted(seen) == ["(b", "a+"]
    finally:
        compiler.close()


def test_a_compiled_guide_does_not_wait_for_guides_that_compile(
    demo_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Semaphore(0), threading.Event()

    def compile_until_told(process: GuideProcess, guide: Guide) -> Answer:
        begun.release()
        may_end.wait()
        return Answer('start: "b"')

    compiler = GrammarCompiler(demo_directory, DEMO_VOCAB)
    try:
        assert_compiles(compiler, "a")
        monkeypatch.setattr(GuideProcess, "compile", compile_until_told)
        others: queue.SimpleQueue[GuideResult] = queue.SimpleQueue()
        for text in ("b", "c"):  # one for each process
            compiler.start(sampling_of(GuideKind.REGEX, text), (), others.put)
            assert begun.acquire(timeout=120)
        assert_compiles(compiler, "a")
        assert others.empty()
    finally:
        may_end.set()
        compiler.close()


def test_a_bounded_number_of_guides_is_kept_and_no_failure_of_the_process(
    demo_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def failing_once(process: GuideProcess, guide: Guide) -> Answer:
        seen.append(guide.text[:1])
        if len(seen) == 1:
            raise GuideProcessError("it died")
        return Answer('start: "a"')

    monkeypatch.setattr(GuideProcess, "compile", failing_once)
    compiler = GrammarCompiler(demo_directory, DEMO_VOCAB)
    try:
        failed = compiled(compiler, GuideKind.REGEX, "a" * 3_000_000)
        assert isinstance(failed, GuideRefusal)
        assert not failed.is_invalid
        for letter in "ababcb":  # two of these are kept
            assert_compiles(compiler, letter * 3_000_000)
        assert_compiles(compiler, "a" * 3_000_000)
        assert "".join(seen) == "aabca"
    finally:
        compiler.close()


def test_grammars_that_are_longer_than_their_guides_are_bounded_too(
    demo_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def lengthening(process: GuideProcess, guide: Guide) -> Answer:
        seen.append(guide.text)
        return Answer('start: "a"\n//' + "x" * 3_000_000)

    monkeypatch.setattr(GuideProcess, "compile", lengthening)
    compiler = GrammarCompiler(demo_directory, DEMO_VOCAB)
    try:
        for letter in "ababcba":  # two of these are kept
            assert_compiles(compiler, letter)
        assert "".join(seen) == "abca"
    finally:
        compiler.close()


def test_close_ends_what_compiles(demo_directory: Path) -> None:
    before = children()
    compiler = GrammarCompiler(demo_directory, DEMO_VOCAB)
    assert_compiles(compiler, "a")
    assert children() - before
    compiler.start(sampling_of(GuideKind.REGEX, "(abc|[d-z]{3,7})+" * 3500), (), lambda result: None)
    compiler.close()
    assert not children() - before
    compiler.start(sampling_of(GuideKind.REGEX, "b"), (), lambda result: pytest.fail("closed"))


def test_a_model_without_a_tokenizer_follows_no_guides(tmp_path: Path) -> None:
    compiler = GrammarCompiler(tmp_path, 100)
    assert "follows no guides" in refusal(compiler, GuideKind.REGEX, "a")
    compiler.close()


def test_the_process_that_compiles_starts_before_the_first_guide(demo_directory: Path) -> None:
    before = children()
    compiler = GrammarCompiler(demo_directory, DEMO_VOCAB)
    try:
        deadline_s = time.monotonic() + 60
        while not children() - before and time.monotonic() < deadline_s:
            os.sched_yield()
        assert children() - before
    finally:
        compiler.close()


def test_the_process_that_compiles_loads_no_torch() -> None:
    """Loading torch would delay the process by seconds."""
    code = "import sys, kvrelay.engine.guides.process; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)
