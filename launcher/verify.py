"""``kvrelay verify``: greedy tokens of transformers, of local prefill and of the hand-off, compared one by one.

transformers runs first and is gone before a deployment starts. Every path answers all prompts twice: one at a time, and
``--concurrency`` at a time. A path that differs in one token fails the command.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvrelay.common.cores import available_cores
from kvrelay.common.errors import ModelError, SettingsError
from kvrelay.launcher.client import TokenClient, ask_all, counter_values
from kvrelay.launcher.errors import VerifyError
from kvrelay.launcher.local import LocalDeployment
from kvrelay.launcher.models import resolve_model
from kvrelay.launcher.prompts import Prompt, built_in_prompts, prompts_from_file, tokenizer_of
from kvrelay.launcher.reference import generate, score
from kvrelay.launcher.settings import LocalSettings, VerifySettings


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer leaves the reference."""

    position: int  # of the output, from 0
    expected: int | None  # token ids; None: one side ended before
    got: int | None


@dataclass(frozen=True, slots=True)
class Column:
    """All answers of one path in one pass."""

    title: str
    answers: tuple[tuple[int, ...], ...]


def first_difference(expected: Sequence[int], got: Sequence[int]) -> Difference | None:
    """None if both are the same."""
    for position in range(max(len(expected), len(got))):
        left = expected[position] if position < len(expected) else None
        right = got[position] if position < len(got) else None
        if left != right:
            return Difference(position, left, right)
    return None


def run(settings: VerifySettings) -> int:
    """The command; returns 0 if every token is the same, 1 if not. Raises KvrelayError if no comparison could be made."""
    console = Console()
    directory = resolve_model(settings.model)
    limit = _max_position(directory) - settings.max_tokens
    if limit < 1:
        raise SettingsError(
            f"--max-tokens is {settings.max_tokens}; {directory.name} takes {limit + settings.max_tokens} tokens in all"
        )
    encode = tokenizer_of(directory)
    if settings.prompts is None:
        prompts = built_in_prompts(encode, limit)
    else:
        prompts = prompts_from_file(Path(settings.prompts), encode, limit)
    with _bars(console) as track:
        expected = _reference(settings, directory, prompts, track)
        columns: list[Column] = []
        if settings.url is not None:
            for concurrency in (1, settings.concurrency):
                columns.append(_pass(settings, settings.url, "url", prompts, track, concurrency))
        else:
            columns += _deployed(settings, directory, "local prefill", prompts, track, num_prefill=0)
            columns += _deployed(settings, directory, "hand-off", prompts, track, num_prefill=1)
    differences = {
        (column.title, index): difference
        for column in columns
        for index, answer in enumerate(column.answers)
        if (difference := first_difference(expected[index], answer)) is not None
    }
    gaps = _gaps(settings, directory, prompts, expected, differences)
    console.print(_table(settings, prompts, columns, differences, gaps))
    num_compared = len(prompts) * len(columns)
    if differences:
        console.print(f"{len(differences)} of {num_compared} answers differ from transformers", style="bold red")
        return 1
    console.print(
        f"all {num_compared} answers equal transformers, {settings.max_tokens} tokens each", style="bold green"
    )
    return 0


Track = Callable[[str, int], Callable[[], None]]


@contextmanager
def _bars(console: Console) -> Iterator[Track]:
    """Gives ``track(title, total)``, which shows a bar and returns what advances it. Plain lines without a terminal."""
    if not console.is_terminal:

        def announce(title: str, total: int) -> Callable[[], None]:
            console.print(f"{title}: {total} prompts …")
            return lambda: None

        yield announce
        return
    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:

        def track(title: str, total: int) -> Callable[[], None]:
            task = progress.add_task(title, total=total)
            return lambda: progress.advance(task)

        yield track


def _reference(
    settings: VerifySettings, directory: Path, prompts: Sequence[Prompt], track: Track
) -> list[tuple[int, ...]]:
    advance = track("transformers", len(prompts))
    expected: list[tuple[int, ...]] = []
    for tokens in generate(
        directory,
        [prompt.token_ids for prompt in prompts],
        dtype=settings.dtype,
        device=settings.device,
        threads=settings.threads or available_cores(),
        max_tokens=settings.max_tokens,
    ):
        expected.append(tuple(tokens))
        advance()
    if len(expected) != len(prompts):
        raise VerifyError(f"transformers answered {len(expected)} of {len(prompts)} prompts; is there enough memory?")
    return expected


def _deployed(
    settings: VerifySettings, directory: Path, path: str, prompts: Sequence[Prompt], track: Track, *, num_prefill: int
) -> list[Column]:
    """Both passes, each on a deployment of its own: the second one must not find its prompts in the prefix cache."""
    local = LocalSettings.of(
        model=settings.model,
        prefill=num_prefill,
        decode=1,
        port=0,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        room_timeout_s=settings.timeout_s,  # a slow machine takes minutes for all at once
        local_prefill_max_tokens=0,  # with a prefill worker, every prompt is handed over
    )
    columns: list[Column] = []
    for concurrency in (1, settings.concurrency):
        with LocalDeployment.from_settings(local, directory) as deployment:
            deployment.wait_ready(settings.timeout_s)
            try:
                columns.append(_pass(settings, deployment.url, path, prompts, track, concurrency))
                if num_prefill:
                    _check_handed_over(deployment.admin_urls["decode-0"], len(prompts))
            except VerifyError as error:
                last = "\n".join(deployment.log.lines[-30:])
                raise VerifyError(f"{error}\nthe deployment's last lines:\n{last}") from error
    return columns


def _check_handed_over(decode_url: str, num_prompts: int) -> None:
    """Equal tokens prove nothing about the hand-off if the decode worker computed the prompts itself."""
    num_verified = sum(counter_values(decode_url, "kvrelay_handoffs_total", {"outcome": "verified"}))
    if num_verified < num_prompts:
        raise VerifyError(
            f"only {num_verified:.0f} of {num_prompts} prompts were handed over; see {decode_url}/metrics"
        )


def _pass(
    settings: VerifySettings, url: str, path: str, prompts: Sequence[Prompt], track: Track, concurrency: int
) -> Column:
    """All prompts once, ``concurrency`` at a time."""
    title = f"{path}, {'alone' if concurrency == 1 else f'{concurrency} at a time'}"
    advance = track(title, len(prompts))
    answers: list[tuple[int, ...]] = []
    with TokenClient(url, settings.timeout_s, settings.api_key) as client:
        model = client.model()

        def ask(index: int) -> list[int]:
            return client.greedy(model, prompts[index].token_ids, settings.max_tokens)

        for _, answer in ask_all(ask, len(prompts), concurrency):
            answers.append(tuple(answer))
            advance()
    return Column(title, tuple(answers))


def _gaps(
    settings: VerifySettings,
    directory: Path,
    prompts: Sequence[Prompt],
    expected: Sequence[Sequence[int]],
    differences: dict[tuple[str, int], Difference],
) -> dict[tuple[str, int], float]:
    """By how much transformers preferred its token: near 0 is rounding, a large gap is a bug."""
    keys: list[tuple[str, int]] = []
    questions: list[tuple[Sequence[int], int, int]] = []
    for key, difference in differences.items():
        if difference.expected is not None and difference.got is not None:
            keys.append(key)
            context = [*prompts[key[1]].token_ids, *expected[key[1]][: difference.position]]
            questions.append((context, difference.expected, difference.got))
    if not questions:
        return {}
    threads = settings.threads or available_cores()
    answers = score(directory, questions, dtype=settings.dtype, device=settings.device, threads=threads)
    return dict(zip(keys, answers, strict=True))


def _table(
    settings: VerifySettings,
    prompts: Sequence[Prompt],
    columns: Sequence[Column],
    differences: dict[tuple[str, int], Difference],
    gaps: dict[tuple[str, int], float],
) -> Table:
    table = Table(title=f"{settings.model}, {settings.dtype}: greedy tokens against transformers")
    table.add_column("prompt")
    table.add_column("tokens", justify="right")
    for column in columns:
        table.add_column(column.title)
    for index, prompt in enumerate(prompts):
        cells = [_cell(differences.get((column.title, index)), gaps.get((column.title, index))) for column in columns]
        table.add_row(prompt.name, str(len(prompt.token_ids)), *cells)
    return table


def _cell(difference: Difference | None, gap: float | None) -> str:
    if difference is None:
        return "[green]ok[/green]"
    text = f"at {difference.position}: {difference.expected} expected, got {difference.got}"
    return f"[red]{text}{'' if gap is None else f', logit gap {gap:.2g}'}[/red]"


def _max_position(directory: Path) -> int:
    """Longest prompt and output together that the model's config allows."""
    try:
        value = json.loads((directory / "config.json").read_text())["max_position_embeddings"]
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{directory}/config.json has no max_position_embeddings") from error
    if not isinstance(value, int):
        raise ModelError(f"{directory}/config.json: max_position_embeddings is {value!r}, not a whole number")
    return value
