"""What happened in a run of chaos, and what of it must not be."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .fleet import Figures


@dataclass
class Report:
    """What happened."""

    same: int = 0
    cut: int = 0  # streams that broke with their gateway; each was asked again
    refused_connections: int = 0  # a gateway that was not there; the next one was asked
    errors: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    idle_after_s: float = 0.0
    drafts: tuple[float, float] = (0.0, 0.0)  # tokens that decode workers drafted, and those of them that came true
    bad_exits: list[str] = field(default_factory=list)
    figures: dict[str, tuple[Figures, Figures]] = field(default_factory=dict)  # before and after, by member

    def problems(self, max_growth_mib: float) -> list[str]:
        """What must not be; empty if nothing of it is."""
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
        """For people."""
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
