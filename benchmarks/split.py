"""Compares a prefill and a decode worker with workers that do both, on the same two cores, in closed loops.

    .venv/bin/python benchmarks/split.py                                        # the four loads, 30 minutes
    .venv/bin/python benchmarks/split.py --budgets 20,40,80,160,none --plots docs/images      # TTFT over p99 gap
    .venv/bin/python benchmarks/split.py --load 16x400 --rounds 1 --scale 0.1                 # a quick trial

The alternatives are one worker on both devices, which computes a prompt twice as fast as one device, or two workers of one device
each. The ways take turns, the others paused. A budget is the decode workers' `--itl-budget-ms`: "auto" is the default, "none" no
limit. A processor without bf16 instructions needs twelve times as long for the demo model. With `--layers 3 --dtype float32` it
needs about as long as others.
"""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path

import click
from peers.figures import LOADED, Results
from peers.plots import curves_plot
from peers.rounds import Sample, Stage, run_figure
from peers.servers import Places, kvrelay_each, kvrelay_local, kvrelay_split
from peers.session import begin, dtype_option, plots_option, run, work_dir_option
from peers.ways import LOOPS, ONE_EACH, ONE_OF_BOTH, POOLS, WAYS, Case, Point, table
from safetensors.torch import load_file, save_file

from kvrelay.launcher.models import resolve_model

_LAYER = re.compile(r"\bmodel\.layers\.(\d+)\.")


def budgets_of(_context: click.Context, _option: click.Parameter, text: str) -> tuple[str, ...]:
    """The budgets in ``text``. Raises click.BadParameter."""
    budgets = tuple(part.strip() for part in text.split(","))
    for budget in budgets:
        if budget not in ("auto", "none") and not budget.isdigit():
            raise click.BadParameter(f"{budget!r} is neither auto, none nor milliseconds")
    return budgets


def options_of(budget: str) -> tuple[str, ...]:
    """The options of `kvrelay local` for a budget."""
    return () if budget == "auto" else ("--itl-budget-ms", "0" if budget == "none" else budget)


def shallow(model: Path, num_layers: int, into: Path) -> Path:
    """A copy of ``model`` in the folder ``into`` that has only its first layers. Its text is of no use; its lengths are forced."""
    copy = into / model.name
    shutil.copytree(model, copy, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    config = json.loads((model / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    for file in model.glob("*.safetensors"):
        found = [(name, _LAYER.search(name), tensor) for name, tensor in load_file(file).items()]
        kept = {name: tensor for name, layer, tensor in found if layer is None or int(layer[1]) < num_layers}
        save_file(kept, copy / file.name)
    return copy


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--load",
    "names",
    multiple=True,
    type=click.Choice([loop.name for loop in LOOPS]),
    help="Only this load, clients x mean prompt; may be repeated.",
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Rounds of each load.")
@click.option(
    "--scale",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="So much of each load's requests and lengths.",
)
@click.option(
    "--budgets",
    callback=budgets_of,
    default="auto",
    show_default=True,
    help="Budgets for the time between tokens: auto, none, or milliseconds.",
)
@click.option("--layers", type=click.IntRange(1), help="Compute with so many of the model's layers only.")
@dtype_option("What workers compute in.")
@plots_option("Draw TTFT over the p99 gap, a point for each budget, into this folder.")
@work_dir_option
def main(
    names: tuple[str, ...],
    rounds: int,
    scale: float,
    budgets: tuple[str, ...],
    layers: int | None,
    dtype: str,
    plots: Path | None,
    work_dir: Path | None,
) -> None:
    """Measure two pools of workers beside workers that do both on this machine."""
    work, say = begin(work_dir, "split")
    model = resolve_model("demo")
    if layers is not None:
        model = shallow(model, layers, work / "shallow")
    places = Places(model, None, work, work, dtype)
    loops = [loop for loop in LOOPS if not names or loop.name in names]
    cases = [Case(loop.name, budget, way) for loop in loops for budget in budgets for way in WAYS]
    points: dict[Case, list[Point | None]] = {case: [] for case in cases}
    for budget in budgets:
        makers = {
            POOLS: partial(kvrelay_split, f"split-{budget}", places, *options_of(budget)),
            ONE_OF_BOTH: partial(kvrelay_local, f"one-of-both-{budget}", places, *options_of(budget)),
            ONE_EACH: partial(kvrelay_each, f"one-each-{budget}", places, *options_of(budget)),
        }
        with Stage(makers, say) as stage:
            for loop in loops:

                def keep(sample: Sample, results: Results, name: str = loop.name, budget: str = budget) -> None:
                    run = results.get(LOADED)
                    points[Case(name, budget, sample.side)].append(None if run is None else Point.of(run))

                figure = loop.scaled(scale).figure
                say(f"budget {budget}: {figure.title}")
                run_figure(figure, stage, rounds, WAYS, say, keep)
    print(f"\n{table(points)}\n", flush=True)
    if plots is not None:
        say(str(curves_plot(points, plots / "ttft-over-gap.png")))
    say("done")


if __name__ == "__main__":
    run(main)
