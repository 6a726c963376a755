"""Whether a model can be cut among the ranks that settings ask for. Found before any process is started; imports torch."""

from __future__ import annotations

from pathlib import Path

import torch

from kvrelay.common.errors import ModelError
from kvrelay.engine.backends.options import device_of
from kvrelay.engine.config.cut import require_experts, require_fit, require_indexers, require_stages
from kvrelay.engine.config.model import load_config, needs_transformers
from kvrelay.engine.settings import ModelSettings


def require_ranks(model: ModelSettings, directory: Path, num_local: int) -> None:
    """Raise ModelError unless the model in ``directory`` can be cut among its ranks, ``num_local`` of them on this host."""
    if model.pipeline_parallel > 1:
        _require_stages(model, directory)
    asked = f"--tensor-parallel is {model.tensor_parallel}"
    if model.pipeline_parallel > 1:
        asked += f" and --pipeline-parallel {model.pipeline_parallel}"
    if model.fp8_activations and model.tensor_parallel > 1:
        raise ModelError(
            f"{asked} and --fp8-activations is on; a row's scale is of all its inputs, of which a rank has a part: take 1, or "
            "leave --fp8-activations out"
        )
    is_through_transformers = needs_transformers(model.backend, directory)
    if device_of(model.device).type == "cuda":
        if (num_gpus := torch.cuda.device_count()) < num_local:
            here = "" if num_local == model.num_ranks else f" on {model.num_ranks // num_local} nodes"
            raise ModelError(
                f"{asked}{here}, and this worker sees {num_gpus} GPUs, one for each rank here: take at most that many"
            )
        if model.kv_dtype != "auto":
            raise ModelError(
                f"{asked} and --kv-dtype {model.kv_dtype}, whose scales are not cut among ranks: take 1, or auto"
            )
    if is_through_transformers:
        if model.expert_parallel:
            raise ModelError(
                "--expert-parallel is on; models that run through transformers have no whole experts for ranks: leave it out"
            )
        if model.weight_format != "full":
            raise ModelError(
                f"--weight-format is {model.weight_format}, which needs a model with a path of its own; take full"
            )
        from kvrelay.engine.models.hf.ranks.cut import require_plan  # noqa: PLC0415 - transformers, too

        require_plan(directory, model.tensor_parallel)
    else:
        config = load_config(directory)
        require_fit(config, model.tensor_parallel)
        if model.expert_parallel:
            require_experts(config, model.tensor_parallel)


def _require_stages(model: ModelSettings, directory: Path) -> None:
    """Raise ModelError unless the model can be cut into stages."""
    asked = f"--pipeline-parallel is {model.pipeline_parallel}"
    if needs_transformers(model.backend, directory):
        raise ModelError(f"{asked}; models that run through transformers have no stages: take 1")
    config = load_config(directory)
    require_stages(config, model.pipeline_parallel)
    require_indexers(config, model.pipeline_parallel)
