"""benchmarks/gpu.py: which sections run, for how long, and how a run reports their findings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gpu
import gpu_compare
import pytest
from click.testing import CliRunner
from gpu_parts.frame.floors import Limits
from gpu_parts.frame.plan import CHECKS, FIGURES, LIMITS, chosen, time_for
from gpu_parts.frame.rows import Checked, Kernel, Row, Unit
from gpu_parts.frame.running import (
    PRELOADED,
    Context,
    Fact,
    Failure,
    Finding,
    Note,
    Outcome,
    Section,
    load,
    run_section,
)
from gpu_parts.frame.session import RunSection, Session
from gpu_parts.frame.sizes import dry_sizes

from tests.processes import is_alive

Found = tuple[list[Finding], Failure | None]

SECTIONS = """
import os, subprocess, sys, time
from gpu_parts.frame.rows import Row, Unit
from gpu_parts.frame.running import Note

def orderly(context):
    yield Note("begins")
    yield Row("figure", Unit.SECONDS, context.seed * 1.0)

def raising(context):
    yield Note("before")
    raise ValueError("seed is 7; it must be something else\\nand more")

def ending(context):
    yield Note("before")
    os._exit(3)

def hanging(context):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield Note(str(child.pid))
    time.sleep(600)
"""


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(dry_sizes(), "cpu", True, tmp_path, time.monotonic() + 100, 7)


@pytest.fixture
def sections_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The module of SECTIONS."""
    (tmp_path / "sections_of_a_test.py").write_text(SECTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    return "sections_of_a_test"


@pytest.fixture
def run_named(
    context: Context, tmp_path: Path, sections_module: str
) -> Callable[[str, float], tuple[Outcome, list[Finding]]]:
    """Runs one of SECTIONS in a real process."""

    def run(name: str, seconds: float) -> tuple[Outcome, list[Finding]]:
        heard: list[Finding] = []
        limited = Context(context.sizes, "cpu", True, tmp_path, time.monotonic() + seconds, context.seed)
        section = Section(name, f"{sections_module}:{name}", seconds)
        return run_section(section, limited, heard.append), heard

    return run


def scripted(script: dict[str, Found], seen: list[Context]) -> Callable[..., Outcome]:
    """A stand-in for processes: each section reports its findings in ``script``. A section that is not in it passes."""

    def run(section: Section, context: Context, hear: Callable[[Finding], None]) -> Outcome:
        seen.append(context)
        kernels = {check.name: kernel for kernel, check in CHECKS.items()}
        right: list[Finding] = [Checked(kernels[section.name], "case", 0.0, 1.0)] if section.name in kernels else []
        findings, failure = script.get(section.name, (right, None))
        for finding in findings:
            hear(finding)
        return Outcome(section.name, 1.0, tuple(findings), failure, "")

    return run


def test_a_run_has_the_limits_and_the_checks_of_what_it_times() -> None:
    assert [section.name for section in chosen(["sampling"])] == [
        "limits",
        "check-sampling",
        "sampling",
    ]
    assert [section.name for section in chosen(["handoff"])] == ["limits", "handoff"]
    assert chosen([]) == [LIMITS, *CHECKS.values(), *FIGURES]
    assert chosen(["checks"]) == [LIMITS, *CHECKS.values()]


def test_every_section_can_be_loaded() -> None:
    assert all(callable(load(section.entry)) for section in chosen([]))


def test_an_early_section_leaves_the_later_ones_time() -> None:
    first, second = Section("a", "", 100.0), Section("b", "", 50.0)
    assert time_for(first, [second], 1000.0) == 100.0
    assert time_for(first, [second], 90.0) == pytest.approx(77.5)
    assert time_for(second, [], 30.0) == 30.0
    assert time_for(first, [second], 10.0) == 5.0


def test_a_wrong_kernel_keeps_its_figures_from_being_taken(context: Context) -> None:
    wrong: Found = ([Checked(Kernel.SAMPLING, "case", float("nan"), 1.0)], None)
    seen: list[Context] = []
    session = Session(context, lambda line: None)
    session.run(chosen(["sampling", "handoff"]), scripted({"check-sampling": wrong}, seen))
    failures = {outcome.name: outcome.failure for outcome in session.outcomes}
    assert failures["handoff"] is None
    assert failures["sampling"] is not None
    assert "refused" in failures["sampling"].reason
    assert len(seen) == len(session.outcomes) - 1
    assert session.numerics_failed
    assert "WRONG" in session.report()


def test_a_check_that_breaks_off_counts_as_wrong(context: Context) -> None:
    broken: Found = ([Checked(Kernel.SAMPLING, "first case", 0.0, 1.0)], Failure("it fell over"))
    session = Session(context, lambda line: None)
    session.run(chosen(["sampling"]), scripted({"check-sampling": broken}, []))
    assert session.numerics_failed
    assert [outcome.name for outcome in session.outcomes if outcome.failure] == ["check-sampling", "sampling"]


def test_limits_and_facts_reach_later_sections(context: Context, tmp_path: Path) -> None:
    limits = Limits(1.0, 2.0, 3.0, 4.0)
    row = Row("figure", Unit.SECONDS, 1.0)
    script: dict[str, Found] = {"limits": ([limits], None), "handoff": ([Fact("a", 5.0), row, Note("done")], None)}
    seen: list[Context] = []
    output = tmp_path / "out.json"
    session = Session(context, lambda line: None, output)
    session.run(chosen(["handoff", "batching-peer"]), scripted(script, seen))
    assert [one.limits for one in seen] == [None, limits, limits]
    assert seen[-1].facts == {"a": 5.0}
    assert not session.numerics_failed
    assert not session.sections_failed
    document = json.loads(output.read_text())
    assert document["limits"]["copy_bytes_per_s"] == 1.0
    assert [one["figure"] for one in document["rows"]] == ["figure"]
    assert document["times_mean_something"] is False
    assert all(document[package] for package in ("torch", "triton", "transformers"))


def test_a_run_that_is_stopped_leaves_what_it_had(context: Context, tmp_path: Path) -> None:
    """Also what its last section found."""
    output = tmp_path / "out.json"

    def run(section: Section, context: Context, hear: Callable[[Finding], None]) -> Outcome:
        if section.name == "handoff":
            hear(Row("figure", Unit.SECONDS, 1.0))
            raise KeyboardInterrupt
        hear(Limits(1.0, 2.0, 3.0, 4.0))
        return Outcome(section.name, 1.0, (), None, "")

    with pytest.raises(KeyboardInterrupt):
        Session(context, lambda line: None, output).run(chosen(["handoff"]), run)
    document = json.loads(output.read_text())
    assert document["limits"]["copy_bytes_per_s"] == 1.0
    assert [section["name"] for section in document["sections"]] == ["limits"]
    assert [row["figure"] for row in document["rows"]] == ["figure"]
    assert [path.name for path in tmp_path.glob("out*")] == ["out.json"]


def test_an_interrupted_run_reports_before_its_model_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last section would have ended some seconds before the time is over."""
    ends_s: list[float] = []

    class Interrupted(Session):
        def run(self, sections: Sequence[Section], run_one: RunSection = run_section) -> None:
            ends_s.append(self.context.ends_s)
            (self.context.work / "model").write_text("large")
            raise KeyboardInterrupt

        def report(self) -> str:
            return f"the model is there: {(self.context.work / 'model').exists()}"

    monkeypatch.setattr("gpu_parts.frame.session.Session", Interrupted)
    monkeypatch.setattr(os, "environ", {**os.environ})  # the command changes it
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    done = CliRunner().invoke(gpu.main, ["--dry-run", "--budget-s", "100", "--work-dir", str(tmp_path)])
    assert done.exit_code == 1
    assert "the model is there: True" in done.output
    assert list(tmp_path.iterdir()) == []
    assert ends_s == [1092.0]


def test_sections_behind_the_end_of_the_time_are_named(context: Context) -> None:
    late = Context(context.sizes, "cpu", True, context.work, time.monotonic(), 7)
    session = Session(late, lambda line: None)
    session.run(chosen(["handoff"]), scripted({}, []))
    assert session.sections_failed
    assert "time was used up" in session.report()


def test_a_section_that_has_too_little_time_leaves_it_to_the_next(context: Context) -> None:
    """A start of 11 s would tell nothing, and take a tenth of the run."""
    long, short = Section("long", "", 90.0, least_s=60.0), Section("short", "", 50.0)
    seen: list[Context] = []
    session = Session(replace(context, ends_s=time.monotonic() + 52.7), lambda line: None)
    session.run([long, short], scripted({}, seen))
    assert [outcome.failure is None for outcome in session.outcomes] == [False, True]
    assert "long: not begun: the run's time was used up: 40 s of the 60 s it takes" in session.report()
    assert seen[0].remaining_s > 45


def test_a_section_runs_in_a_process_of_its_own(
    run_named: Callable[[str, float], tuple[Outcome, list[Finding]]],
) -> None:
    outcome, heard = run_named("orderly", 100.0)
    assert outcome.failure is None
    assert heard == [Note("begins"), Row("figure", Unit.SECONDS, 7.0)]


def test_a_section_that_raises_or_ends_keeps_what_it_had(
    run_named: Callable[[str, float], tuple[Outcome, list[Finding]]],
) -> None:
    outcome, heard = run_named("raising", 100.0)
    assert heard == [Note("before")]
    assert outcome.failure is not None
    assert outcome.failure.reason == "ValueError: seed is 7; it must be something else"
    assert "sections_of_a_test.py" in outcome.failure.trace
    outcome, heard = run_named("ending", 100.0)
    assert heard == [Note("before")]
    assert outcome.failure is not None
    assert "status 3" in outcome.failure.reason


class Clock:
    """Stands in for the module ``time``. A test puts it forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


def assert_killed(findings: list[Finding]) -> None:
    """Wait until the process that ``hanging`` had started has ended: a kill is under way when ``run_section`` returns."""
    (note,) = findings
    assert isinstance(note, Note)
    latest_s = time.monotonic() + 30.0
    while is_alive(int(note.text)):
        assert time.monotonic() < latest_s, f"process {note.text} was not killed with its section"
        time.sleep(0.01)


def test_a_section_that_hangs_is_stopped_with_all_it_started(
    context: Context, sections_module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is over when it has begun to hang."""
    heard: list[Finding] = []
    monkeypatch.setattr("gpu_parts.frame.running.time", clock := Clock())

    def hear(finding: Finding) -> None:
        heard.append(finding)
        clock.ahead_s = 100.0

    outcome = run_section(Section("hanging", f"{sections_module}:hanging", 100.0), context, hear)
    assert outcome.failure is not None
    assert outcome.failure.reason.startswith("stopped")
    assert_killed(heard)


def test_an_interrupted_run_does_not_wait_for_its_section(context: Context, sections_module: str) -> None:
    heard: list[Finding] = []

    def interrupt(finding: Finding) -> None:
        heard.append(finding)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_section(Section("hanging", f"{sections_module}:hanging", 100.0), context, interrupt)
    assert context.remaining_s > 0, "it waited for its section"
    assert_killed(heard)


def test_what_is_preloaded_asks_for_no_device() -> None:
    program = f"""
import importlib, torch
def refused(*arguments):
    raise AssertionError("a device was asked for")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda.init = torch._C._cuda_getDeviceCount = refused
for name in {PRELOADED!r}:
    importlib.import_module(name)
assert not torch.cuda.is_initialized()
"""
    directory = Path(__file__).parents[2] / "benchmarks"
    environment = {"PATH": "", "PYTHONPATH": str(directory), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_two_results_stand_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_COMMIT", "abc123")
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    context = Context(dry_sizes(), "cpu", False, tmp_path, time.monotonic() + 5, 7)
    figures = [[Row("a step", Unit.SECONDS, 0.004, 0.002), Row("gone", Unit.SHARE, 0.5)],
               [Row("a step", Unit.SECONDS, 0.003, 0.002), Row("new", Unit.BYTES_PER_S, 2e9)]]  # fmt: skip
    for path, rows in zip(paths, figures, strict=True):
        session = Session(context, lambda line: None, path, rows=rows)
        path.write_text(json.dumps(session.document()))
    result = CliRunner().invoke(gpu_compare.main, list(map(str, paths)))
    assert result.exit_code == 0, result.output
    assert result.output.count("commit abc123") == 2
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.output.splitlines() if "|" in line]
    assert cells[2:] == [
        ["a step", "4.00 ms", "3.00 ms", "0.750", "2.00", "1.50"],
        ["gone", "50.0 %", "-", "-", "-", "-"],
        ["new", "-", "2.00 GB/s", "-", "-", "-"],
    ]
