"""What guesses tokens beside an engine: a draft model, which is a second engine, or in the engine itself an EAGLE-3 head or the
checkpoint's own layer for drafting.

Of an engine with several ranks only the first one has a draft model or a head, whole. The others compute its guesses as rows of
steps, and know no more of it. Of the checkpoint's layer each rank has a part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.common.errors import ModelError
from kvrelay.common.kv_geometry import KvGeometry
from kvrelay.engine.config.tokenizer import require_same_tokens
from kvrelay.engine.factory import load_part
from kvrelay.engine.load_progress import log_begin
from kvrelay.engine.ranks.messages import LoadSettings
from kvrelay.engine.settings import FakeSettings, Guessing, KvSettings, ModelSettings, sequences_at_a_time
from kvrelay.engine.step.interface import DraftHead, Engine

if TYPE_CHECKING:
    import torch

    from kvrelay.engine.config.model import ModelConfig

logger = logging.getLogger(__name__)


def load_draft_engine(
    draft_model: str,
    model: ModelSettings,
    kv: KvSettings,
    fake: FakeSettings,
    *,
    kv_memory_mb: int,
    max_num_seqs: int | None,
    max_batched_tokens: int | None,
    progress: Callable[[int, int], None],
) -> Engine:
    """Load the model in the directory ``draft_model``, which guesses the tokens of ``model``. ``kv_memory_mb``: of its pool.

    It is whole in this process, and has all of its threads, however many ranks ``model`` has: these wait meanwhile. Load it before
    ``model``, so that its share of a GPU is known then. Raises ModelError if it cannot be served, or has other tokens.
    """
    directory = Path(draft_model)
    if not directory.is_dir():
        raise ModelError(f"--draft-model {draft_model!r} is not a model directory; start through the kvrelay command")
    if fake.is_fake:
        raise ModelError(f"--draft-model is {draft_model}; the fake engine makes its tokens up: leave it out")
    require_same_tokens(Path(model.model), directory)
    _require_loadable(directory, model)
    own = replace(
        model,
        model=draft_model,
        backend="auto",
        weight_format="full",
        fp8_activations=False,
        kv_dtype="auto",
        tensor_parallel=1,
        pipeline_parallel=1,
        expert_parallel=False,
        run_ahead="off",
        max_model_len=None,
        logits_processors=(),
        adapters=None,
    )
    own_kv = replace(kv, num_blocks=None, kv_memory_mb=kv_memory_mb)
    weights_nbytes = 0

    def count(done: int, total: int) -> None:
        nonlocal weights_nbytes
        weights_nbytes = total
        progress(done, total)

    log_begin(logger, directory)
    engine = load_part(LoadSettings(own, own_kv, max_num_seqs, max_batched_tokens, decodes=True), None, count)
    logger.info(
        "the draft model %s takes %.0f MiB for weights, and %d MiB for K/V of %d tokens%s",
        directory.name,
        weights_nbytes / 2**20,
        kv_memory_mb,
        engine.card.num_blocks * engine.card.layout.block_size,
        " on the first rank" if model.num_ranks > 1 else "",
    )
    return engine


def _require_loadable(directory: Path, model: ModelSettings) -> None:
    """Raise ModelError if the files show already that a draft model, or the ranks of ``model``, will be refused."""
    from kvrelay.engine.outline import outline_model  # noqa: PLC0415 - imports torch
    from kvrelay.engine.rank_check import require_ranks  # noqa: PLC0415 - imports torch

    if model.num_ranks > 1:
        require_ranks(model, Path(model.model), num_local=1)  # GPUs are counted with the model
    require_draft_model(outline_model(directory, "auto", None).geometry, str(directory))


def require_draft_model(geometry: KvGeometry, draft_model: str) -> None:
    """Raise ModelError if a model of this geometry cannot be a draft model."""
    if geometry.has_states:
        raise ModelError(
            f"--draft-model is {draft_model}, which has recurrent layers: they cannot take back a wrong guess; take a model without"
        )


def require_head(
    draft_model: str,
    model: ModelSettings,
    kv: KvSettings,
    fake: FakeSettings,
    *,
    kv_memory_mb: int,
    max_num_seqs: int | None,
) -> Guessing:
    """What the head in the directory ``draft_model`` will be beside ``model``, on the first rank. See ``load_head``.

    Raises ModelError unless it is a head for this model, and a worker with these settings can have it, as far as that is known
    without reading a tensor.
    """
    if fake.is_fake:
        raise ModelError(f"--draft-model is {draft_model}; the fake engine has no hidden states: leave it out")
    from kvrelay.engine.backends.options import device_of  # noqa: PLC0415 - torch takes seconds to import

    num_slots = sequences_at_a_time(max_num_seqs, device_of(model.device).type)
    return head_on_first_rank(draft_model, model, kv_memory_mb, num_slots, kv.block_size)


def head_on_first_rank(
    draft_model: str, model: ModelSettings, kv_memory_mb: int, num_slots: int, block_size: int | None = None
) -> Guessing:
    """As ``require_head``, for ``num_slots`` sequences on any device."""
    directory = Path(draft_model)
    if not directory.is_dir():
        raise ModelError(f"--draft-model {draft_model!r} is not a head's directory; start through the kvrelay command")
    config, dtype = _read_by(f"--draft-model is {draft_model}", "a head", model)
    from kvrelay.engine.backends.heads import head_nbytes  # noqa: PLC0415 - torch takes seconds to import
    from kvrelay.engine.config.head import load_head_config  # noqa: PLC0415

    kv_bytes, is_cut = kv_memory_mb * 2**20, model.tensor_parallel > 1
    nbytes = head_nbytes(directory, kv_bytes, config, dtype, num_slots, is_cut=is_cut, block_size=block_size)
    return Guessing(nbytes, taps=load_head_config(directory, config).taps)


def require_layer(
    model: ModelSettings, kv: KvSettings, fake: FakeSettings, *, kv_memory_mb: int, max_num_seqs: int | None
) -> Guessing:
    """What the checkpoint's own layer for drafting will be beside ``model``, on each rank. Its weights are loaded with the model's.

    Raises ModelError unless the checkpoint has one, as far as its config.json tells, and a worker with these settings can have it.
    """
    if fake.is_fake:
        raise ModelError("--speculation is mtp; the fake engine has no hidden states: take ngram, or off")
    from kvrelay.engine.backends.options import device_of  # noqa: PLC0415 - torch takes seconds to import

    num_slots = sequences_at_a_time(max_num_seqs, device_of(model.device).type)
    return layer_on_each_rank(model, kv_memory_mb, num_slots, kv.block_size)


def layer_on_each_rank(
    model: ModelSettings, kv_memory_mb: int, num_slots: int, block_size: int | None = None
) -> Guessing:
    """As ``require_layer``, for ``num_slots`` sequences on any device."""
    config, dtype = _read_by("--speculation is mtp", "a layer for drafting", model)
    from kvrelay.engine.backends.heads import draft_layer_nbytes  # noqa: PLC0415 - torch takes seconds to import
    from kvrelay.engine.config.draft_layer import with_draft_layer  # noqa: PLC0415

    kv_bytes = kv_memory_mb * 2**20
    nbytes = draft_layer_nbytes(kv_bytes, with_draft_layer(config), dtype, num_slots, block_size)
    return Guessing(nbytes, kv_bytes, ())


def _read_by(asked: str, what: str, model: ModelSettings) -> tuple[ModelConfig, torch.dtype]:
    """The config and the type of a model whose hidden states ``what`` reads. Raises ModelError if it cannot."""
    if model.pipeline_parallel > 1:
        raise ModelError(
            f"{asked}, and --pipeline-parallel {model.pipeline_parallel}; {what} reads hidden states of "
            "layers that other stages have: take --tensor-parallel instead, --speculation draft-model, or ngram"
        )
    import torch  # noqa: PLC0415 - takes seconds to import

    from kvrelay.engine.config.model import load_config, needs_transformers  # noqa: PLC0415

    if needs_transformers(model.backend, Path(model.model)):
        raise ModelError(
            f"{asked}; models that run through transformers have no heads and no layers for drafting: take --speculation ngram"
        )
    config = load_config(Path(model.model))
    dtype: torch.dtype = getattr(torch, config.dtype if model.dtype == "auto" else model.dtype)
    return config, dtype


def own_layer(engine: Engine) -> DraftHead:
    """The checkpoint's own layer for drafting, of an engine that ``require_layer`` was called for."""
    from kvrelay.engine.ranks.engine import RankedEngine  # noqa: PLC0415 - imports torch
    from kvrelay.engine.torch_engine import TorchEngine  # noqa: PLC0415

    assert isinstance(engine, TorchEngine | RankedEngine), f"{type(engine).__name__} has no hidden states"
    head = engine.head
    assert head is not None, "the engine was loaded without the layer"
    return head


def load_head(draft_model: str, engine: Engine, kv_memory_mb: int) -> DraftHead:
    """Load the EAGLE-3 head in the directory ``draft_model`` beside an engine that has not computed a step yet, and whose settings
    ``require_head`` has seen.

    ``kv_memory_mb``: of its pool. Raises ModelError if its files are broken, or its pool is too small for the engine's blocks.
    """
    from kvrelay.engine.ranks.engine import RankedEngine  # noqa: PLC0415 - imports torch
    from kvrelay.engine.torch_engine import TorchEngine  # noqa: PLC0415

    assert isinstance(engine, TorchEngine | RankedEngine), f"{type(engine).__name__} has no hidden states"
    return engine.load_head(Path(draft_model), kv_memory_mb * 2**20)
