"""What is settled before a load is sent: where results go, how prompts are made, whether they fit the model.

A measurement takes minutes; what would spoil it must be found before it starts.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import psutil

from kvrelay.common.errors import SettingsError
from kvrelay.launcher.bench.bodies import WORDS, BodySpec, single_token_words
from kvrelay.launcher.bench.server import ServedModel
from kvrelay.launcher.bench.settings import BenchSettings
from kvrelay.launcher.bench.values import parse_id_range
from kvrelay.launcher.bench.workload import Workload
from kvrelay.launcher.models import resolve_model

_NUM_LOOKED_AT = 100  # requests of a closed loop whose lengths are compared with the model's
_TOKENS_PER_S = 1e6  # of prompts, that one process makes at least
_FIRST_S = 0.5  # what is due in that time is made before the start
_MAX_MAKING_S = 10.0


def check_places(settings: BenchSettings) -> None:
    """A result that cannot be written must not be found out after the measurement. Raises SettingsError."""
    for flag, text, is_directory in (
        ("--output", settings.report.output, False),
        ("--plots", settings.report.plots, True),
    ):
        if text is None:
            continue
        path = Path(text)
        folder = path if is_directory else path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"{flag}: cannot make {path} ({error.strerror})") from error
        if path.is_dir() != is_directory and path.exists():
            raise SettingsError(f"{flag} is {text!r}; it must be a {'directory' if is_directory else 'file'}")
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise SettingsError(f"{flag}: cannot write in {folder} ({error.strerror})") from error


def check_server_pid(settings: BenchSettings) -> None:
    """Raises SettingsError if --server-pid says nothing: no such process, or none that somebody else started."""
    pids = settings.target.server_pid
    if pids and settings.is_self_served:
        raise SettingsError("--server-pid is given with --self-serve, which knows what it starts; leave it out")
    if missing := [str(pid) for pid in pids if not psutil.pid_exists(pid)]:
        raise SettingsError(
            f"--server-pid is {', '.join(missing)}: there is no such process on this machine; leave it out for a server elsewhere"
        )


def body_spec(settings: BenchSettings, model: ServedModel, num_ids: int | None) -> BodySpec:
    """How prompts are made for ``model``, whose vocabulary has ``num_ids`` tokens (None: unknown). Raises SettingsError."""
    prompt = settings.prompt
    assert prompt.prompt_seed is not None, "chosen before"
    ids = parse_id_range(prompt.token_ids, "--token-ids")
    last_id = ids.stop - 1
    if num_ids is not None and last_id >= num_ids:
        raise SettingsError(
            f"--token-ids is {prompt.token_ids!r}; {model.name} has {num_ids} tokens, so that ids end at {num_ids - 1}"
        )
    words: tuple[str, ...] = ()
    if settings.target.api != "completions":
        words = WORDS if prompt.tokenizer is None else _words_of(prompt.tokenizer)
    return BodySpec(
        model=model.name,
        api=settings.target.api,
        prompt_seed=prompt.prompt_seed,
        first_id=ids.start,
        last_id=last_id,
        words=words,
        ignore_eos=prompt.ignore_eos,
        temperature=prompt.temperature,
        seed=prompt.seed,
    )


def tokenizer_directory(name: str) -> Path:
    """Where ``--tokenizer`` is; may download it."""
    return resolve_model(name, needs_weights=False)


def _words_of(name: str) -> tuple[str, ...]:
    from tokenizers import Tokenizer  # noqa: PLC0415 - only for prompts of text that ask for it

    tokenizer = Tokenizer.from_file(str(tokenizer_directory(name) / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return single_token_words(encode)


def length_warnings(workload: Workload, model: ServedModel) -> list[str]:
    """Requests that do not fit the model would only measure its error messages. Raises SettingsError if none fits."""
    limit = model.max_model_len
    if limit is None:
        return []
    requests = list(workload.timed)
    if workload.closed is not None:
        looked_at = (workload.closed.next_request(0.0) for _ in range(_NUM_LOOKED_AT))
        requests += [request for request in looked_at if request is not None]
    num_long = sum(request.prompt_tokens + request.output_tokens > limit for request in requests)
    if requests and num_long == len(requests):
        raise SettingsError(
            f"every request asks for more than the {limit} tokens (prompt and output) that {model.name} takes; "
            "lower --input-len, --output-len or --prefix-tokens"
        )
    if num_long:
        return [
            f"{num_long} of {len(requests)} planned requests ask for more than the {limit} tokens that {model.name} takes"
        ]
    return []


def making_s(workload: Workload) -> float:
    """How long the prompts take to make that are due at the start; the run begins that much later."""
    requests = [request for request in workload.timed if (request.due_s or 0.0) < _FIRST_S]
    if workload.closed is not None:
        requests += itertools.islice(workload.closed.upcoming(), workload.closed.concurrency)
    return min(_MAX_MAKING_S, sum(request.prompt_tokens for request in requests) / _TOKENS_PER_S)
