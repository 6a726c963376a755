"""Reads Mooncake traces: when requests came to a real service, how long they were, and which blocks they shared.

One JSON object a line: ``timestamp`` (ms), ``input_length`` and ``output_length`` (tokens), ``hash_ids``: a number for each
block of 512 tokens, equal where the tokens were equal. https://github.com/kvcache-ai/Mooncake (FAST25 traces).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvrelay.common.errors import SettingsError


class TraceRow(msgspec.Struct, frozen=True):
    """One request of a trace."""

    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(path: Path) -> list[TraceRow]:
    """All rows, the first one at 0 ms, in order of time. Raises SettingsError that names the line."""
    decoder = msgspec.json.Decoder(TraceRow)
    rows: list[TraceRow] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise SettingsError(f"--trace: cannot read {path} ({error.strerror})") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise SettingsError(
                f"--trace: line {number} of {path} is no request of a Mooncake trace: {error}"
            ) from error
        if row.input_length < 1 or row.output_length < 0 or row.timestamp < 0:
            raise SettingsError(
                f"--trace: line {number} of {path}: input_length must be at least 1, output_length and timestamp at least 0; "
                f"they are {row.input_length}, {row.output_length} and {row.timestamp:g}"
            )
        rows.append(row)
    if not rows:
        raise SettingsError(f"--trace: {path} has no requests")
    rows.sort(key=lambda row: row.timestamp)
    first_ms = rows[0].timestamp
    return [msgspec.structs.replace(row, timestamp=row.timestamp - first_ms) for row in rows]
