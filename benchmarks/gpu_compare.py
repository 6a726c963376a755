"""Sets two results of ``gpu.py --json`` side by side: each figure before and after, and their ratio.

    PYTHONPATH=src python benchmarks/gpu_compare.py BEFORE.json AFTER.json

Ratios mean something only for one kind of device, so both are named first. A figure in one file only is shown with a dash.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from gpu_parts.frame.rows import Unit

_HEAD = ("figure", "before", "after", "after / before", "of its floor before", "after")
_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("before", type=_FILE)
@click.argument("after", type=_FILE)
def main(before: Path, after: Path) -> None:
    """Print both documents' devices and versions, then a table of all figures."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in (before, after)]
    for path, document in zip((before, after), documents, strict=True):
        click.echo(f"{path.name}: {origin(document)}")
    click.echo()
    click.echo(side_by_side(*documents))


def origin(document: dict[str, Any]) -> str:
    """Where and with what a document was measured."""
    versions = ", ".join(f"{name} {document[name]}" for name in ("torch", "triton", "python"))
    return f"{document['device']}; {versions}; commit {document['commit'] or 'unknown'}; {document['date']}"


def side_by_side(before: dict[str, Any], after: dict[str, Any]) -> str:
    """A Markdown table of all figures of both documents, in the order of their first appearance."""
    old, new = ({row["figure"]: row for row in document["rows"]} for document in (before, after))
    cells = [_HEAD, *(_cells(figure, old.get(figure), new.get(figure)) for figure in old | new)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEAD))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join(lines)


def _cells(figure: str, old: dict[str, Any] | None, new: dict[str, Any] | None) -> tuple[str, ...]:
    values = [None if row is None else row["value"] for row in (old, new)]
    ratio = values[1] / values[0] if values[0] and values[1] is not None else None
    return (
        figure,
        *(_number(row) for row in (old, new)),
        "-" if ratio is None else f"{ratio:.3f}",
        *("-" if row is None or row["ratio"] is None else f"{row['ratio']:.2f}" for row in (old, new)),
    )


def _number(row: dict[str, Any] | None) -> str:
    return "-" if row is None or row["value"] is None else Unit(row["unit"]).text(row["value"])


if __name__ == "__main__":
    main()
