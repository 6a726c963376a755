"""Writes the result of a run: its figures for readers, and the records that they come from.

Not for reading: ``records.read_result`` does that, and takes the records only, so that figures are computed in one way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvrelay.launcher.bench.records import RunResult
from kvrelay.launcher.bench.summary import summarize


def write_result(path: Path, result: RunResult) -> None:
    """Write ``result`` as JSON (indented), its figures as ``summary`` in front of its requests. Raises OSError."""
    document: dict[str, Any] = msgspec.to_builtins(result)
    requests = document.pop("requests")  # thousands of lines: nothing is found behind them
    document |= {"summary": msgspec.to_builtins(summarize(result)), "requests": requests}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))
