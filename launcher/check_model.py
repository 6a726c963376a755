"""``kvrelay check-model``: tells whether and how a model runs, and what it needs, before its weights are downloaded."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import click
import msgspec
import transformers

from kvrelay.common.errors import KvrelayError, ModelError
from kvrelay.common.kv_geometry import Chunk, GroupKind, KvGeometry, KvGroup, num_physical_blocks, window_size
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.engine.config.tokenizer import require_same_tokens
from kvrelay.engine.drafting import head_on_first_rank, layer_on_each_rank, require_draft_model
from kvrelay.engine.outline import ModelOutline, check_files, compare, outline_model, write_random_weights
from kvrelay.engine.settings import KvSettings, ModelSettings, prompt_step_tokens, sequences_at_a_time
from kvrelay.launcher.models import find_configuration, resolve_model
from kvrelay.launcher.progress import announce
from kvrelay.launcher.tiktoken_file import has_tokenizer

# Usable memory in GiB.
GPUS = {
    "a10": 22, "a100": 79, "a100-40gb": 39, "b200": 178, "h100": 79, "h200": 140, "l4": 22, "l40s": 44, "t4": 14.5,
}  # fmt: skip
_LONG = 4096  # tokens of the sequences that are counted for a model with states
_MOST_RANDOM = 10**9  # parameters; generating more takes too long
# Not of a model without weights: its repository was not fetched as a whole.
_TOKENIZER = "tokenizer.json: make one with AutoTokenizer.from_pretrained(…).save_pretrained(…) before you serve it"


@dataclass(frozen=True, slots=True)
class Fit:
    """How a model fits on one GPU, or on one GPU for each rank of a worker."""

    num_ranks: int
    memory_gib: float  # of each GPU
    weights_nbytes: int  # on each GPU, or on the GPU with the least room left
    step_nbytes: int  # estimated
    kv_nbytes: int  # room left for K/V on each GPU, or on the same one
    num_tokens: int  # that fit in kv_nbytes
    is_in_long: bool = False  # in sequences of _LONG tokens: of a shorter one, a token takes more


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a check. ``reason``: why the model does not run; None: it runs."""

    model: str
    reason: str | None = None
    outline: ModelOutline | None = None
    fit: Fit | None = None
    draft_nbytes: int = 0  # of what guesses, on the first GPU
    draft_kind: str | None = None  # of what guesses; of "mtp" bytes are on each GPU, and the weights among the model's
    logits: str | None = None  # how logits were compared, or why not
    lacks: str | None = None  # what the directory has to get before a gateway can serve it

    def as_json(self) -> dict[str, Any]:
        """The report for programs. Sizes are in bytes, lengths in tokens."""
        found: dict[str, Any] = {"model": self.model, "runs": self.reason is None, "reason": self.reason}
        if self.outline is not None:
            shape, geometry = self.outline.shape, self.outline.geometry
            found |= {
                "path": self.outline.path,
                "architecture": shape.architecture,
                "dtype": shape.dtype,
                "num_parameters": self.outline.num_parameters,
                "weights_bytes": self.outline.weights_nbytes,
                "gpu_weights_bytes": self.outline.gpu_weights_nbytes,
                "encoder_bytes": self.outline.encoder_nbytes,
                "max_model_len": shape.max_position_embeddings,
                "kv_bytes_per_token": geometry.token_nbytes,
                "kv_block_size": geometry.block_size,
                "kv_groups": [
                    _group_json(group, own, geometry.block_size)
                    for group, own in zip(geometry.groups, self.outline.ranks[0].geometry.groups, strict=True)
                ],
            }
        gpu = None if self.fit is None else dataclasses.asdict(self.fit)
        return found | {"gpu": gpu, "draft_bytes": self.draft_nbytes, "logits": self.logits, "lacks": self.lacks}

    def lines(self) -> list[str]:
        """The report for people."""
        rows: list[tuple[str, str]] = []
        if self.outline is not None:
            rows += _rows(self.outline)
        if self.fit is not None:
            ranks = f"{self.fit.num_ranks} " if self.fit.num_ranks > 1 else ""
            rows.append((f"{ranks}GPU{'s' if ranks else ''} of {self.fit.memory_gib:g} GiB", _fit_text(self.fit)))
        if self.draft_kind == "mtp":
            rows.append(("drafts", f"{_gib(self.draft_nbytes)} for guesses on each GPU, beside the layer's weights"))
        elif self.draft_nbytes:
            rows.append(
                ("draft model", f"{_gib(self.draft_nbytes)} of weights and K/V on the first GPU, which has less for KV")
            )
        if self.logits is not None:
            rows.append(("logits", self.logits))
        if self.lacks is not None:
            rows.append(("lacks", self.lacks))
        verdict = "runs" if self.reason is None else f"does not run: {self.reason}"
        return [f"{self.model} {verdict}", *(f"  {name:<16} {text}" for name, text in rows)]


def run(
    model: str,
    *,
    gpu: str | None,
    memory_gib: float | None,
    ranks: tuple[int, int],
    backend: str,
    drafting: tuple[str, str | None] | None,
    as_json: bool,
) -> int:
    """Run the command and return its exit code. ``ranks``: the ranks of each stage, and the number of stages. ``drafting``: the
    values of ``--speculation`` and ``--draft-model``.
    """
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    try:
        directory = find_configuration(model)
        draft: tuple[str, Path | None] | None = None
        if drafting is not None:
            kind, name = drafting  # a head's size is in its files
            find = partial(resolve_model, needs_tokenizer=False) if kind == "head" else find_configuration
            draft = kind, None if name is None else find(name)
    except KvrelayError as error:
        click.echo(f"kvrelay: {error}", err=True)
        return 2
    with announce(f"checking {model}"):
        report = examine(model, directory, backend, memory_gib if gpu is None else GPUS[gpu], *ranks, draft)
    click.echo(json.dumps(report.as_json(), indent=2) if as_json else "\n".join(report.lines()))
    return 0 if report.reason is None else 1


def examine(
    model: str,
    directory: Path,
    backend: str,
    memory_gib: float | None,
    num_ranks: int,
    num_stages: int,
    drafting: tuple[str, Path | None] | None = None,
) -> Report:
    """Check the model in ``directory``. ``memory_gib``: of each GPU; None: do not check the fit. ``drafting``: the kind and the
    directory of what guesses; of "mtp" there is none.
    """
    draft_nbytes, kind = 0, None if drafting is None else drafting[0]
    outline: ModelOutline | None = None
    fit: Fit | None = None
    try:
        block_size = KvSettings().block_size
        outline = outline_model(directory, backend, block_size, num_ranks, num_stages, has_draft_layer=kind == "mtp")
        if drafting is not None:
            own = ModelSettings(
                str(directory), backend=backend, tensor_parallel=num_ranks, pipeline_parallel=num_stages
            )
            draft_nbytes = _draft_nbytes(*drafting, own)
        fit = None if memory_gib is None else fit_of(outline, memory_gib, draft_nbytes, on_each=kind == "mtp")
        if fit is not None and fit.num_tokens < outline.geometry.block_size:
            gpus = "one GPU" if fit.num_ranks == 1 else f"{fit.num_ranks} GPUs"
            raise ModelError(f"it does not fit {gpus} of {fit.memory_gib:g} GiB")
        has_weights = bool(list(directory.glob("*.safetensors")))
        if has_weights:
            check_files(directory, outline)
        logits = _compared(directory, outline, has_weights)
        lacks = _TOKENIZER if has_weights and not has_tokenizer(directory) else None
        return Report(
            model, outline=outline, fit=fit, draft_nbytes=draft_nbytes, draft_kind=kind, logits=logits, lacks=lacks
        )
    except ModelError as error:
        return Report(model, str(error), outline, fit, draft_nbytes, kind)


def _draft_nbytes(kind: str, draft_model: Path | None, model: ModelSettings) -> int:
    """What guesses for ``model`` on a worker with default settings: the bytes of its weights and its pool on the first GPU.

    Of "mtp": the bytes of its pool on each GPU. Raises ModelError if a worker would refuse it.
    """
    kv_memory_mb, num_slots = DecodeSchedulerSettings().draft_kv_memory_mb, sequences_at_a_time(None, "cuda")
    if draft_model is None:
        return layer_on_each_rank(model, kv_memory_mb, num_slots).nbytes
    if kind == "head":
        return head_on_first_rank(str(draft_model), model, kv_memory_mb, num_slots).nbytes
    require_same_tokens(Path(model.model), draft_model)
    own = outline_model(draft_model, "auto", None)
    require_draft_model(own.geometry, str(draft_model))
    return own.gpu_weights_nbytes + kv_memory_mb * 2**20


def fit_of(outline: ModelOutline, memory_gib: float, draft_nbytes: int = 0, *, on_each: bool = False) -> Fit:
    """The memory left for K/V by a worker with default settings and ``memory_gib`` for each rank, on the rank with the least.

    ``draft_nbytes``: of what guesses, on the first rank, or ``on_each``.
    """
    step_nbytes = outline.step_nbytes(prompt_step_tokens(None, "cuda"), sequences_at_a_time(None, "cuda"))
    share = int(memory_gib * 2**30 * KvSettings().kv_memory_fraction)
    fits: list[Fit] = []
    for number, rank in enumerate(outline.ranks):
        kv_nbytes = max(0, share - rank.weights_nbytes - step_nbytes - (draft_nbytes if on_each or number == 0 else 0))
        geometry = rank.geometry
        num_tokens = kv_nbytes // geometry.block_nbytes * geometry.block_size
        is_in_long = geometry.has_states or bool(outline.shape.entries)
        if is_in_long:  # a sequence has few blocks of states, or of rows beside entries, however long it is
            of_sequence = num_physical_blocks(geometry.windows, _LONG, geometry.block_size, max_step_tokens=1)
            num_tokens = kv_nbytes // (of_sequence * geometry.physical_nbytes) * _LONG
        fits.append(
            Fit(
                *(len(outline.ranks), memory_gib, rank.weights_nbytes, step_nbytes, kv_nbytes, num_tokens),
                is_in_long=is_in_long,
            )
        )
    return min(fits, key=lambda fit: (fit.num_tokens, fit.kv_nbytes))


def _compared(directory: Path, outline: ModelOutline, has_weights: bool) -> str:
    """Compare the logits with transformers, if memory allows. Raises ModelError if they differ."""
    needed, available = outline.reference_nbytes, _available_nbytes()
    if needed > 0.8 * available:
        return f"not compared: that takes {_gib(needed)} of memory here, and there are {_gib(available)}"
    if has_weights:
        return _distance_text(compare(directory, outline.path), "its weights")
    if outline.num_parameters > _MOST_RANDOM:
        return "not compared: the weights are not here, and there are too many to make random ones"
    with tempfile.TemporaryDirectory(prefix="kvrelay-check-") as temporary:
        write_random_weights(directory, Path(temporary), outline.path)
        return _distance_text(compare(Path(temporary), outline.path), "random weights, as its own are not here")


def _distance_text(distance: float, weights: str) -> str:
    return f"as transformers computes them in float32 (relative distance {distance:.1g}), with {weights}"


def _available_nbytes() -> int:
    """Memory that a process could take, as Linux estimates it; 0 without an estimate."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)


def _rows(outline: ModelOutline) -> list[tuple[str, str]]:
    shape, geometry = outline.shape, outline.geometry
    stored = f", {_gib(outline.gpu_weights_nbytes)} as stored on a GPU" if outline.has_stored else ""
    whose = "our forward pass" if outline.path == "native" else "transformers' layers over our attention"
    return [
        ("path", f"{outline.path}: {whose} ({shape.architecture})"),
        ("weights", f"{outline.num_parameters:,} parameters, {_gib(outline.weights_nbytes)} in {shape.dtype}{stored}"),
        *_encoder_rows(outline),
        ("longest", f"{shape.max_position_embeddings:,} tokens"),
        ("KV", f"{geometry.token_nbytes:,} bytes per token{_for_good(outline)}, {_token_text(geometry)}"),
        *_group_rows(outline),
    ]


def _group_rows(outline: ModelOutline) -> list[tuple[str, str]]:
    """A row for each group, and one for neighbours that are alike: DeepSeek-V4 has some thirty."""
    geometry, own = outline.geometry, outline.ranks[0].geometry
    texts = (
        _state_text(outline, *pair) if pair[0].kind is GroupKind.STATE else _group_text(pair[0])
        for pair in zip(geometry.groups, own.groups, strict=True)
    )
    rows, first = [], 0
    for text, alike in groupby(texts):
        last = first + len(list(alike)) - 1
        rows.append((f"KV group {first}" if first == last else f"KV groups {first}-{last}", text))
        first = last + 1
    return rows


def _state_text(outline: ModelOutline, group: KvGroup, own: KvGroup) -> str:
    """``own``: what a rank has of the group."""
    whole, part = (f"{outline.geometry.block_size * one.token_nbytes / 2**20:.2f} MiB" for one in (group, own))
    on_ranks = f", of which each rank keeps {part}" if outline.divides_states else ", whole on each rank"
    return f"state: {len(group.layers)} layers, {whole} per sequence{on_ranks if len(outline.ranks) > 1 else ''}"


def _encoder_rows(outline: ModelOutline) -> list[tuple[str, str]]:
    if not outline.encoder_nbytes:
        return []
    return [
        (
            "encoders",
            f"{_gib(outline.encoder_nbytes)} more on a worker that reads images, which has less for KV",
        )
    ]


def _for_good(outline: ModelOutline) -> str:
    if not outline.shape.entries:
        return ""
    kept = sum(group.token_nbytes for group in outline.geometry.groups if group.window is None)
    return f" within its window and {kept:,} behind it"


def _token_text(geometry: KvGeometry) -> str:
    return f"{geometry.block_nbytes / 2**20:.2f} MiB per block of {geometry.block_size}"


def _group_text(group: KvGroup) -> str:
    sizes = f"{group.key_size}" if group.key_size == group.value_size else f"{group.key_size} and {group.value_size}"
    window = "" if group.window is None else f" of {window_size(group.window):,} tokens"
    kind = "chunks" if isinstance(group.window, Chunk) else group.kind
    is_latent = group.value_size == 0
    kept = f"{group.key_size} numbers for all heads" if is_latent else f"{group.num_kv_heads} heads of {sizes}"
    return (
        f"{kind}{window}: {len(group.layers)} layers, {kept} in {group.dtype}, {group.token_nbytes:,} bytes per token"
    )


def _group_json(group: KvGroup, own: KvGroup, block_size: int) -> dict[str, Any]:
    """``own``: what a rank has of the group."""
    if group.kind is GroupKind.STATE:
        return {
            "kind": str(group.kind),
            "num_layers": len(group.layers),
            "bytes_per_sequence": block_size * group.token_nbytes,
            "bytes_per_sequence_and_rank": block_size * own.token_nbytes,
        }
    return {
        "kind": str(group.kind),
        "window": msgspec.to_builtins(group.window),
        "num_layers": len(group.layers),
        "num_kv_heads": group.num_kv_heads,
        "key_size": group.key_size,
        "value_size": group.value_size,
        "dtype": group.dtype,
        "bytes_per_token": group.token_nbytes,
    }


def _fit_text(fit: Fit) -> str:
    per = f" in sequences of {_LONG:,}" if fit.is_in_long else ""
    return (
        f"about {_gib(fit.kv_nbytes)} for KV{' on each' if fit.num_ranks > 1 else ''}: {fit.num_tokens:,} tokens{per} (beside "
        f"{_gib(fit.weights_nbytes)} of weights, an estimated {_gib(fit.step_nbytes)} for steps, and a tenth of the memory that "
        "stays free)"
    )


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
