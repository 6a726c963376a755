"""``kvrelay verify``: compares greedy tokens of transformers, of local prefill and of the hand-off, one by one.

transformers runs first and ends before a deployment starts. Every path answers all prompts twice: one at a time, and
``--concurrency`` at a time. The command fails if a path differs in one token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvrelay.common.errors import ModelError, SettingsError
from kvrelay.common.system import available_cores
from kvrelay.launcher.client import counter_values, greedy, http_client, served_models
from kvrelay.launcher.errors import AnswerError, LauncherError, VerifyError
from kvrelay.launcher.local.deployment import LocalDeployment
from kvrelay.launcher.models import resolve_model
from kvrelay.launcher.settings import LocalSettings, VerifySettings
from kvrelay.launcher.verify.prompts import Prompt, built_in_prompts, prompts_from_file, tokenizer_of
from kvrelay.launcher.verify.reference import Question, Reference


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where an answer differs from the reference."""

    position: int  # of the output, from 0
    expected: int | None  # token ids; None: this side has ended
    got: int | None


@dataclass(frozen=True, slots=True)
class Column:
    """All answers of one path in one pass."""

    title: str
    answers: tuple[tuple[int, ...], ...]


def first_difference(expected: Sequence[int], got: Sequence[int]) -> Difference | None:
    """The first difference, or None if both are equal."""
    for position in range(max(len(expected), len(got))):
        left = expected[position] if position < len(expected) else None
        right = got[position] if position < len(got) else None
        if left != right:
            return Difference(position, left, right)
    return None


def run(settings: VerifySettings) -> int:
    """Run the command. Returns 0 if all tokens are equal, else 1. Raises KvrelayError if no comparison could be made."""
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
    if settings.url is not None:  # first: transformers takes minutes
        with http_client(settings.url, settings.timeout_s, settings.api_key) as client:
            _asked(client, settings.model, directory)
    # A deployment that runs has taken the memory of its GPU.
    device = "cpu" if settings.url is not None and settings.device == "auto" else settings.device
    reference = Reference(directory, settings.dtype, device, settings.threads or available_cores())
    columns_of_bars = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns_of_bars, console=console) as bars:
        task = bars.add_task("transformers", total=None)
        expected = reference.generate([prompt.token_ids for prompt in prompts], settings.max_tokens)
        bars.remove_task(task)
        columns: list[Column] = []
        if settings.url is not None:
            for concurrency in (1, settings.concurrency):
                columns.append(_pass(settings, directory, settings.url, "url", prompts, bars, concurrency))
        else:
            columns += _deployed(settings, directory, "local prefill", prompts, bars, num_prefill=0)
            columns += _deployed(settings, directory, "hand-off", prompts, bars, num_prefill=1)
    differences = {
        (column.title, index): difference
        for column in columns
        for index, answer in enumerate(column.answers)
        if (difference := first_difference(expected[index], answer)) is not None
    }
    gaps = _gaps(reference, prompts, expected, differences)
    console.print(_table(settings, prompts, columns, differences, gaps))
    num_compared = len(prompts) * len(columns)
    if differences:
        console.print(f"{len(differences)} of {num_compared} answers differ from transformers", style="bold red")
        return 1
    console.print(
        f"all {num_compared} answers equal transformers, {settings.max_tokens} tokens each", style="bold green"
    )
    return 0


def _deployed(
    settings: VerifySettings, directory: Path, path: str, prompts: Sequence[Prompt], bars: Progress, *, num_prefill: int
) -> list[Column]:
    """Both passes, each on its own deployment, so that the second does not find its prompts in the prefix cache."""
    local = LocalSettings.of(
        model=settings.model,
        prefill=num_prefill,
        decode=1,
        port=0,
        device=settings.device,
        dtype=settings.dtype,
        backend=settings.backend,
        threads=settings.threads,
        room_timeout_s=settings.timeout_s,  # a slow machine needs minutes for all prompts at once
        local_prefill="fallback",  # a prefill worker, if there is one, computes every prompt
    )
    columns: list[Column] = []
    for concurrency in (1, settings.concurrency):
        with LocalDeployment.from_settings(local, directory) as deployment:
            deployment.wait_ready(settings.timeout_s)
            try:
                columns.append(_pass(settings, directory, deployment.url, path, prompts, bars, concurrency))
                if num_prefill:
                    _check_handed_over(deployment.admin_urls["decode-0"], len(prompts))
            except LauncherError as error:
                last = "\n".join(deployment.log.lines[-30:])
                raise VerifyError(f"{error}\nthe deployment's last lines:\n{last}") from error
    return columns


def _check_handed_over(decode_url: str, num_prompts: int) -> None:
    """Raise VerifyError if the decode worker computed prompts itself: equal tokens would not prove the hand-off."""
    num_verified = sum(counter_values(decode_url, "kvrelay_handoffs_total", {"outcome": "verified"}))
    if num_verified < num_prompts:
        raise VerifyError(
            f"only {num_verified:.0f} of {num_prompts} prompts were handed over; see {decode_url}/metrics"
        )


def _asked(client: httpx.Client, model: str, directory: Path) -> str:
    """The served model to ask: the one named like ``--model`` or its directory, else the first. Raises AnswerError."""
    names = served_models(client)
    if not names:
        raise AnswerError(f"{client.base_url} serves no model")
    return next((name for name in names if name in (model, directory.name)), names[0])


def _pass(
    settings: VerifySettings,
    directory: Path,
    url: str,
    path: str,
    prompts: Sequence[Prompt],
    bars: Progress,
    concurrency: int,
) -> Column:
    """Answer all prompts once, ``concurrency`` at a time."""
    title = f"{path}, {'alone' if concurrency == 1 else f'{concurrency} at a time'}"
    task = bars.add_task(title, total=len(prompts))
    answers: list[tuple[int, ...]] = []
    with http_client(url, settings.timeout_s, settings.api_key) as client, ThreadPoolExecutor(concurrency) as pool:
        model = _asked(client, settings.model, directory)
        for answer in pool.map(lambda prompt: greedy(client, model, prompt.token_ids, settings.max_tokens), prompts):
            answers.append(answer)
            bars.advance(task)
    return Column(title, tuple(answers))


def _gaps(
    reference: Reference,
    prompts: Sequence[Prompt],
    expected: Sequence[Sequence[int]],
    differences: dict[tuple[str, int], Difference],
) -> dict[tuple[str, int], float]:
    """By how much transformers preferred its own token. A gap near 0 is rounding, a large gap is a bug."""
    questions: dict[tuple[str, int], Question] = {}
    for key, difference in differences.items():
        if difference.expected is not None and difference.got is not None:
            context = [*prompts[key[1]].token_ids, *expected[key[1]][: difference.position]]
            questions[key] = (context, difference.expected, difference.got)
    if not questions:
        return {}
    return dict(zip(questions, reference.score(list(questions.values())), strict=True))


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
    """The most tokens of prompt and output together, by the model's config."""
    try:
        config = json.loads((directory / "config.json").read_text())
        value = {**config, **(config.get("text_config") or {})}["max_position_embeddings"]
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{directory}/config.json has no max_position_embeddings") from error
    if not isinstance(value, int):
        raise ModelError(f"{directory}/config.json: max_position_embeddings is {value!r}, not a whole number")
    return value
