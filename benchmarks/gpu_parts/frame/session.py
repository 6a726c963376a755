"""One run: runs its sections in turn, collects their findings, and prints and writes them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from gpu_parts.frame.floors import Limits
from gpu_parts.frame.plan import CHECKS, refusal, time_for
from gpu_parts.frame.rows import Checked, Row, absences, table
from gpu_parts.frame.running import Context, Fact, Failure, Finding, Note, Outcome, Section, run_section
from gpu_parts.frame.timing import device_state

RunSection = Callable[[Section, Context, Callable[[Finding], None]], Outcome]


def _commit() -> str | None:
    """What is measured: GIT_COMMIT of the environment, or the repository's; None if nobody knows."""
    if (given := os.environ.get("GIT_COMMIT")) is not None:
        return given
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


@dataclass(slots=True)
class Session:
    """All findings so far. Call ``run`` once."""

    context: Context  # the run's context; ``ends_s`` is the end of the run
    say: Callable[[str], None]  # prints a line of progress
    output: Path | None = None  # JSON with everything so far, which a run that is stopped leaves
    rows: list[Row] = field(default_factory=list)
    checks: list[Checked] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    is_right: dict[str, bool] = field(default_factory=dict)  # results of completed kernel checks
    begun_s: float = field(default_factory=time.monotonic)
    device: str = field(default_factory=lambda: device_state().partition(",")[0])
    commit: str | None = field(default_factory=_commit)

    def run(self, sections: Sequence[Section], run_one: RunSection = run_section) -> None:
        """Run every section, or record why not. Facts are passed to later sections."""
        for number, section in enumerate(sections):
            seconds = time_for(section, sections[number + 1 :], self.context.remaining_s)
            reason = refusal(section, self.is_right)
            if reason is None and seconds < section.least_s:
                reason = (
                    f"not begun: the run's time was used up: {seconds:.0f} s of the {section.least_s:.0f} s it takes"
                )
            if reason is not None:
                outcome = Outcome(section.name, 0.0, (), Failure(reason), "")
            else:
                self._tell(section.name, f"begins, at most {seconds:.0f} s")
                context = replace(self.context, ends_s=time.monotonic() + seconds)
                outcome = run_one(section, context, lambda finding, name=section.name: self._hear(name, finding))  # type: ignore[misc]
            self._conclude(section, outcome)
            self._write()

    @property
    def numerics_failed(self) -> bool:
        """Whether a kernel is wrong, or its check was not completed."""
        return not all(self.is_right.values())

    @property
    def sections_failed(self) -> bool:
        """Whether a section failed or was not started."""
        return any(outcome.failure is not None for outcome in self.outcomes)

    def report(self) -> str:
        """The report for people: failed checks, the table, absent peers, skipped figures, failed sections."""
        wrong = [f"- {check.text}" for check in self.checks if not check.is_right]
        failed = [f"- {outcome.name}: {outcome.failure.reason}" for outcome in self.outcomes if outcome.failure]
        parts = [
            f"numerics: {len(self.checks)} comparisons, {len(wrong)} of them wrong",
            *wrong,
            "",
            table(self.rows, has_verdicts=not self.context.is_dry),
        ]
        missing = [f"- {line}" for line in absences(self.rows)]
        if missing:
            parts += ["", "absent peers:", *missing]
        if left_out := [f"- {row.figure}: {row.note}" for row in self.rows if row.value is None]:
            parts += ["", "not measured:", *left_out]
        if failed:
            parts += ["", "sections that failed:", *failed]
        return "\n".join(parts)

    def document(self) -> dict[str, Any]:
        """Everything for JSON."""
        context = self.context
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": self.device,
            "commit": self.commit,
            "is_dry_run": context.is_dry,
            "times_mean_something": not context.is_dry,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": _version("triton"),
            "transformers": _version("transformers"),
            "seed": context.seed,
            "seconds": time.monotonic() - self.begun_s,
            "sizes": asdict(context.sizes),
            "limits": None if context.limits is None else asdict(context.limits),
            "checks": [{**asdict(check), "is_right": check.is_right} for check in self.checks],
            "rows": [row.document() for row in self.rows],
            "sections": [
                {
                    "name": outcome.name,
                    "seconds": outcome.seconds,
                    "failure": None if outcome.failure is None else asdict(outcome.failure),
                    "notes": [finding.text for finding in outcome.findings if isinstance(finding, Note)],
                    "device_after": outcome.device_after,
                }
                for outcome in self.outcomes
            ],
        }

    def _hear(self, name: str, finding: Finding) -> None:
        match finding:
            case Note(text):
                self._tell(name, text)
            case Checked():
                self.checks.append(finding)
                self._tell(name, finding.text)
            case Row():
                self.rows.append(finding)
                value = finding.note if finding.value is None else finding.unit.text(finding.value)
                self._tell(name, f"{finding.figure}: {value}")
            case Fact(fact, value):
                self.context = replace(self.context, facts={**self.context.facts, fact: value})
            case Limits():
                self.context = replace(self.context, limits=finding)
        self._write()

    def _conclude(self, section: Section, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        for kernel, check in CHECKS.items():
            if check is section:
                checked = [finding for finding in outcome.findings if isinstance(finding, Checked)]
                is_complete = outcome.failure is None and bool(checked)
                self.is_right[kernel] = is_complete and all(one.is_right for one in checked)
        if outcome.failure is None:
            self._tell(section.name, f"done in {outcome.seconds:.1f} s ({outcome.device_after})")
        else:
            self._tell(section.name, f"FAILED: {outcome.failure.reason}")
            if outcome.failure.trace:
                self._tell(section.name, outcome.failure.trace)

    def _write(self) -> None:
        """Write the JSON, whole or not at all: the run may be stopped here, too."""
        if self.output is not None:
            partial = self.output.with_name(f"{self.output.name}.partial")
            partial.write_text(json.dumps(self.document(), indent=1) + "\n", encoding="utf-8")
            partial.replace(self.output)

    def _tell(self, name: str, text: str) -> None:
        self.say(f"[{time.monotonic() - self.begun_s:5.1f} s] {name}: {text}")


def _version(package: str) -> str | None:
    """Of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
