"""From settings to a loaded engine. The one place that decides which engine runs; torch is imported only here."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kvrelay.common.errors import ModelError
from kvrelay.engine.interface import Engine
from kvrelay.engine.settings import KvSettings, ModelSettings


def load_engine(
    model: ModelSettings,
    kv: KvSettings,
    *,
    max_num_seqs: int,
    progress: Callable[[int, int], None],
) -> Engine:
    """Load the model that ``model.model`` names; it must be a directory by now (the launcher resolves names).

    ``progress`` hears (bytes loaded, bytes in all). Raises ModelError if the directory cannot be served.
    """
    directory = Path(model.model)
    if not directory.is_dir():
        raise ModelError(
            f"{model.model!r} is not a model directory; start through the kvrelay command, which fetches models by name"
        )
    from kvrelay.engine.torch_engine import EngineOptions, TorchEngine  # noqa: PLC0415 - torch takes seconds to import

    options = EngineOptions(
        model_dir=directory,
        model_id=directory.name,
        dtype=model.dtype,
        device=model.device,
        weight_format=model.weight_format,
        block_size=kv.block_size,
        num_blocks=kv.num_blocks,
        kv_memory_bytes=None if kv.kv_memory_mb is None else kv.kv_memory_mb * 2**20,
        max_model_len=model.max_model_len,
        num_threads=model.threads or os.cpu_count() or 1,
        max_num_seqs=max_num_seqs,
    )
    return TorchEngine.load(options, progress)
