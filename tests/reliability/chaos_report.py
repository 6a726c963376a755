"""The report of a chaos run, and its problems."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .fleet import Figures


@dataclass
class Report:
    """The figures of a run."""

    same: int = 0
    cut: int = 0  # streams that broke with their gateway; the client asked again
    refused_connections: int = 0  # connections that a missing gateway refused; the client asked another one
    errors: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    idle_after_s: float = 0.0
    drafts: tuple[float, float] = (0.0, 0.0)  # tokens that decode workers drafted, and the accepted ones
    bad_exits: list[str] = field(default_factory=list)
    figures: dict[str, tuple[Figures, Figures]] = field(default_factory=dict)  # by member: before, after

    def problems(self, max_growth_mib: float) -> list[str]:
        """All problems of the run; empty if there are none."""
        problems = [f"another answer: {one}" for one in self.different] + [f"an error: {one}" for one in self.errors]
        problems += [f"a bad end: {one}" for one in self.bad_exits]
        for name, (before, after) in self.figures.items():
            if after.num_threads > before.num_threads + 2:
                problems.append(f"{name} has {after.num_threads} threads, had {before.num_threads}")
            if after.num_descriptors > before.num_descriptors + 12:
                problems.append(f"{name} has {after.num_descriptors} descriptors open, had {before.num_descriptors}")
            if after.rss_mib > before.rss_mib + max_growth_mib:
                problems.append(f"{name} holds {after.rss_mib:.0f} MiB, held {before.rss_mib:.0f}")
        return problems

    def lines(self) -> list[str]:
        """The report as lines of text."""
        faults = ", ".join(f"{count} {fault}" for fault, count in sorted(self.faults.items()))
        lines = [
            f"faults: {faults or 'none'}",
            f"answers: {self.same} the same as without faults, {len(self.different)} different, {len(self.errors)} errors",
            f"clients: {self.cut} streams broke with their gateway and were asked again, {self.refused_connections} times the "
            f"other gateway was asked at once; the longest answer took {self.longest_s:.1f} s",
            f"drafts: of {self.drafts[0]:.0f} tokens {self.drafts[1]:.0f} came true",
            f"afterwards: every block free or cached after {self.idle_after_s:.1f} s",
        ]
        for name, (before, after) in sorted(self.figures.items()):
            lines.append(
                f"{name}: {before.rss_mib:.0f} MiB, {before.num_descriptors} descriptors, {before.num_threads} threads before; "
                f"{after.rss_mib:.0f}, {after.num_descriptors}, {after.num_threads} after"
            )
        return lines
