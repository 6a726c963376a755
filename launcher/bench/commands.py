"""Subcommands of ``kvrelay bench``. What runs them is loaded when they run."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("compare", short_help="Put results of several runs side by side.")
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--plots", type=click.Path(path_type=Path), metavar="DIR", help="Directory for plots of all runs.")
def compare(results: tuple[Path, ...], plots: Path | None) -> int:
    """Put RESULTS, files that `kvrelay bench --output` wrote, side by side. The first one is what others are compared with.

    \b
    Example:
      kvrelay bench compare colocated.json disaggregated.json --plots plots
    """
    from kvrelay.launcher.bench.compare import run_compare  # noqa: PLC0415 - tables and plots only if they are drawn

    return run_compare(list(results), plots)
