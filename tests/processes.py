"""Whether a process still runs."""

from __future__ import annotations

from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether the process exists and has not ended. One that was killed may be so for a moment."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # ProcessLookupError: it ended between opening and reading
        return False
