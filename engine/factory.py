"""From settings to a loaded engine. Only this module decides which engine runs, and imports torch for that."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.common.errors import ModelError, SettingsError
from kvrelay.common.model_card import ModelCard
from kvrelay.common.system import available_cores
from kvrelay.engine.fake.factory import make_fake_engine
from kvrelay.engine.fake.images import FakeImageReader
from kvrelay.engine.guides.guidance import GuideCompiler, NoGuides
from kvrelay.engine.images.interface import ImageReader
from kvrelay.engine.kv.host_memory import require_memory
from kvrelay.engine.load_progress import log_begin
from kvrelay.engine.ranks.messages import LoadSettings
from kvrelay.engine.ranks.nodes import OtherNodes
from kvrelay.engine.sampling.processors import load_processors
from kvrelay.engine.settings import (
    DEFAULT_BLOCK_SIZE,
    FakeSettings,
    Guessing,
    KvSettings,
    ModelSettings,
    prompt_step_tokens,
    sequences_at_a_time,
)
from kvrelay.engine.step.interface import Engine

if TYPE_CHECKING:
    from kvrelay.engine.models.ranks import RankPart
    from kvrelay.engine.torch_engine import TorchEngine

logger = logging.getLogger(__name__)

NOTHING_GUESSES = Guessing()


def load_engine(
    model: ModelSettings,
    kv: KvSettings,
    fake: FakeSettings,
    *,
    max_num_seqs: int | None,
    max_batched_tokens: int | None,
    decodes: bool,
    reads_images: bool = False,
    progress: Callable[[int, int], None],
    nodes: OtherNodes | None = None,
    guessing: Guessing = NOTHING_GUESSES,
) -> Engine:
    """Load the model in the directory ``model.model`` (the launcher has resolved names).

    ``max_num_seqs``, ``max_batched_tokens``: None: as many as suit the device (:func:`sequences_at_a_time`,
    :func:`prompt_step_tokens`).
    ``decodes``: whether the worker decodes. ``reads_images``: whether it should read images, if the model does. ``progress`` is
    called with (bytes loaded, bytes in all). ``nodes``: the other hosts' ranks.
    ``guessing``: what will guess tokens in the engine.
    Raises ModelError if the directory cannot be served, SettingsError if a logits processor does not exist.
    """
    directory = Path(model.model)
    if not directory.is_dir():
        raise ModelError(
            f"{model.model!r} is not a model directory; start through the kvrelay command, which fetches models by name"
        )
    if fake.is_fake:
        for flag, number in (("tensor", model.tensor_parallel), ("pipeline", model.pipeline_parallel)):
            if number > 1:
                raise ModelError(f"--{flag}-parallel is {number}; the fake engine has one rank")
        return make_fake_engine(directory, model, kv, fake, reads_images=reads_images)
    log_begin(logger, directory)
    settings = LoadSettings(model, kv, max_num_seqs, max_batched_tokens, decodes, reads_images, guessing)
    if model.num_ranks == 1:
        return load_part(settings, None, progress)
    from kvrelay.engine.rank_check import require_ranks  # noqa: PLC0415 - imports torch

    num_local = model.num_ranks if nodes is None else nodes.place.num_local
    require_ranks(model, directory, num_local)
    from kvrelay.engine.ranks.engine import RankedEngine  # noqa: PLC0415 - imports torch

    return RankedEngine.load(settings, partial(load_part, settings), progress, nodes)


def require_host_kv(host_kv_mb: int, model: ModelSettings, fake: FakeSettings) -> None:
    """Raise SettingsError or ModelError unless a worker with these settings can keep so much KV in the host's memory. 0: none."""
    if host_kv_mb == 0:
        return
    from kvrelay.engine.backends.options import device_of  # noqa: PLC0415 - imports torch

    if fake.is_fake or device_of(model.device).type == "cpu":
        raise SettingsError(
            f"--host-kv-mb is {host_kv_mb}, but the KV pool is in the host's memory already: raise --kv-memory-mb instead"
        )
    require_memory(host_kv_mb)


def load_part(settings: LoadSettings, part: RankPart | None, progress: Callable[[int, int], None]) -> TorchEngine:
    """Load the model, or a rank's ``part`` of it, in this process. Raises as ``load_engine``."""
    from kvrelay.engine.backends.options import (  # noqa: PLC0415 - torch takes seconds to import
        EngineOptions,
        device_of,
        keep_compiled,
    )

    model, kv, guessing = settings.model, settings.kv, settings.guessing
    guesses = part is None or part.is_leader or guessing.mtp_kv_bytes > 0
    if device_of(model.device).type == "cuda":
        keep_compiled(os.environ)
    directory = Path(model.model)
    options = EngineOptions(
        model_dir=directory,
        model_id=directory.name,
        dtype=model.dtype,
        kv_dtype=model.kv_dtype,
        device=model.device,
        weight_format=model.weight_format,
        fp8_activations=model.fp8_activations,
        cpu_kernels=model.cpu_kernels,
        expert_parallel=model.expert_parallel,
        block_size=kv.block_size or DEFAULT_BLOCK_SIZE,
        may_widen_blocks=kv.block_size is None,
        num_blocks=kv.num_blocks,
        kv_memory_bytes=None if kv.kv_memory_mb is None else kv.kv_memory_mb * 2**20,
        staging_bytes=None if kv.staging_mb is None else kv.staging_mb * 2**20,
        max_model_len=model.max_model_len,
        num_threads=max(1, (model.threads or available_cores()) // (1 if part is None else part.num_local)),
        kv_memory_fraction=kv.kv_memory_fraction,
        max_num_seqs=sequences_at_a_time(settings.max_num_seqs, device_of(model.device).type),
        max_batched_tokens=prompt_step_tokens(settings.max_batched_tokens, device_of(model.device).type),
        decodes=settings.decodes,
        reads_images=settings.reads_images,
        cuda_graphs=model.cuda_graphs,
        run_ahead=model.run_ahead,
        head_bytes=guessing.nbytes if guesses else 0,
        mtp_kv_bytes=guessing.mtp_kv_bytes,
        taps=guessing.taps if guesses else None,
        adapter_bytes=0 if model.adapters is None else model.adapter_memory_mb * 2**20,
        processors=load_processors(model.logits_processors),
    )
    from kvrelay.engine.config.model import needs_transformers  # noqa: PLC0415 - imports torch

    if needs_transformers(model.backend, directory):
        from kvrelay.engine.transformers_engine import load_transformers_engine  # noqa: PLC0415 - transformers, too

        return load_transformers_engine(options, progress, part)
    from kvrelay.engine.torch_engine import TorchEngine  # noqa: PLC0415

    return TorchEngine.load(options, progress, part)


def load_guides(model: ModelSettings, fake: FakeSettings, vocab_size: int) -> GuideCompiler:
    """The guide compiler for the model in the directory ``model.model``. ``vocab_size``: the engine's."""
    if fake.is_fake:
        return NoGuides("the fake engine generates no text")
    from kvrelay.engine.guides.compiler import GrammarCompiler  # noqa: PLC0415 - not every engine follows guides

    return GrammarCompiler(Path(model.model), vocab_size)


def load_images(model: ModelSettings, fake: FakeSettings, card: ModelCard) -> ImageReader | None:
    """The reader of images for the model in the directory ``model.model``; None if prompts have none. ``card``: the engine's."""
    if card.no_images:
        return None
    if fake.is_fake:
        return FakeImageReader.of_tokenizer(Path(model.model))
    from kvrelay.engine.models.hf.reading import make_reader  # noqa: PLC0415 - imports torch

    return make_reader(Path(model.model))
