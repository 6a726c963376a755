"""Whether a model runs and what it needs, from its ``config.json`` alone. With weights: a comparison of its logits with
transformers'.

Nothing here loads a model to serve it; :mod:`kvrelay.engine.factory` does. This module predicts what that would find.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from kvrelay.common.errors import ModelError
from kvrelay.common.kv_geometry import KvGeometry
from kvrelay.engine.backends.cpu.build import cpu_ops, cpu_paged_ops
from kvrelay.engine.backends.options import EngineOptions
from kvrelay.engine.config.cut import cuts_of, require_fit, require_indexers, require_stages
from kvrelay.engine.config.draft_layer import with_draft_layer
from kvrelay.engine.config.model import ModelShape, load_config, needs_transformers
from kvrelay.engine.config.quantisation import Quantisation, load_quantisation
from kvrelay.engine.kv.division import divided_states
from kvrelay.engine.kv.geometry import geometry_of, state_block_size
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.models.decoder import DecoderModel
from kvrelay.engine.models.hf import loading
from kvrelay.engine.models.hf.check import LONGEST, check_model, compare_native, plain_logits
from kvrelay.engine.models.hf.entries import require_dtype
from kvrelay.engine.models.hf.gate import probe_layers
from kvrelay.engine.models.hf.loading import load_full_config, load_model
from kvrelay.engine.models.hf.model import TransformersModel, shape_of
from kvrelay.engine.models.hf.outline import (
    NoWeights,
    buffers_nbytes,
    float32_names,
    is_published_full,
    model_without_weights,
    num_tower_parameters,
)
from kvrelay.engine.models.hf.parts import candidates
from kvrelay.engine.models.hf.ranks.cut import cut_model
from kvrelay.engine.models.hf.ranks.cuts import find_cuts
from kvrelay.engine.models.hf.text import text_model
from kvrelay.engine.models.ops import Model, StepOps
from kvrelay.engine.settings import DEFAULT_BLOCK_SIZE
from kvrelay.engine.transformers_engine import checkpoint_dtype
from kvrelay.engine.weights import checkpoint
from kvrelay.engine.weights.checkpoint import checkpoint_places, load_weights
from kvrelay.engine.weights.targets import Place


@dataclass(frozen=True, slots=True)
class RankOutline:
    """One rank's part of a model on a GPU."""

    weights_nbytes: int  # roughly
    geometry: KvGeometry  # its part of a block


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutline:
    """A model that can run, before it is loaded."""

    path: str  # "native" or "transformers"
    shape: ModelShape
    geometry: KvGeometry
    num_parameters: int
    has_stored: bool = False  # some weights stay quantised on a GPU
    gpu_weights_nbytes: int  # on one GPU, roughly
    ranks: tuple[RankOutline, ...]  # of a worker; at least one
    divides_states: bool = False  # each of several ranks has a part of the recurrent layers and their states
    encoder_nbytes: int = 0  # of what encodes images and sounds, which prefill workers may keep beside the weights

    @property
    def weights_nbytes(self) -> int:
        """Bytes of the full weights in the model's number format. On a CPU quantised weights become full."""
        return self.num_parameters * self._dtype.itemsize

    @property
    def reference_nbytes(self) -> int:
        """Approximate memory of :func:`compare`: twice the model in float32."""
        return 2 * 4 * self.num_parameters

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.shape.dtype)
        return dtype

    def step_nbytes(self, num_tokens: int, num_seqs: int) -> int:
        """Estimated memory of a step: the rows into and out of the widest product, and the logits.

        A worker on a GPU measures it.
        """
        wide = 16 * self.shape.num_q_heads * self.shape.head_dim
        return num_tokens * wide * self._dtype.itemsize + num_seqs * self.shape.vocab_size * 4 * 4


def outline_model(
    directory: Path,
    backend: str,
    block_size: int | None,
    num_ranks: int = 1,
    num_stages: int = 1,
    *,
    has_draft_layer: bool = False,
) -> ModelOutline:
    """The outline of the model in ``directory``, whose weights need not be there. ``backend``, ``block_size``: as for a worker.

    ``num_ranks``: ranks of each of ``num_stages`` on GPUs; each has parts of all experts. ``has_draft_layer``: whether the
    checkpoint's layer for drafting is loaded, too. Raises ModelError with the reason why a
    worker could not serve it.
    """
    quantisation, asked = load_quantisation(directory), block_size  # raises for unsupported formats
    block_size = block_size or DEFAULT_BLOCK_SIZE
    if not needs_transformers(backend, directory):
        config = load_config(directory)
        if has_draft_layer:
            config = with_draft_layer(config)
        require_fit(config, num_ranks)
        require_stages(config, num_stages)
        require_indexers(config, num_stages)
        kv_dtype: torch.dtype = getattr(torch, config.dtype)
        places = checkpoint_places(config)
        return ModelOutline(
            path="native",
            shape=config,
            geometry=geometry_of(config, block_size, kv_dtype),
            num_parameters=sum(math.prod(place.shape) for place in places.values()),
            has_stored=quantisation is not None
            and any(_stays(quantisation, name, place) for name, place in places.items()),
            gpu_weights_nbytes=_gpu_nbytes(places, kv_dtype, quantisation),
            ranks=tuple(
                RankOutline(
                    _gpu_nbytes(checkpoint_places(config, cut), kv_dtype, quantisation),
                    geometry_of(cut.config(config), block_size, kv_dtype),
                )
                for cut in cuts_of(num_ranks, num_stages)
            ),
        )
    if num_stages > 1:
        raise ModelError("models that run through transformers have no stages")
    dtype: torch.dtype = getattr(torch, checkpoint_dtype(directory))
    config = load_full_config(directory)
    require_dtype(config, dtype)
    model = model_without_weights(config, dtype)
    num_parameters = model.num_parameters()
    with NoWeights():
        layers = probe_layers(model)
        shape = of_rank = shape_of(model, layers, dtype)
        stored = _stored_names(model, quantisation)
        wide = float32_names(model, dtype)
        of_buffers = buffers_nbytes(model, wide)
        nbytes = of_buffers + _stored_nbytes(model.named_parameters(), stored, wide, dtype, quantisation)
        own_nbytes = [nbytes]
        if num_ranks > 1:
            whole, cuts = TransformersModel(model, layers, shape), cuts_of(num_ranks, 1)
            own_nbytes = []
            for its in (find_cuts(whole, cut) for cut in cuts):  # ranks may have unequal numbers of columns
                parts = ((name, its.of(name, one)) for name, one in model.named_parameters())
                own_nbytes.append(of_buffers + _stored_nbytes(parts, stored, wide, dtype, quantisation))
            of_rank = cut_model(whole, cuts[0])[0].shape  # attention and states are alike on all
    if shape.states and asked is None:
        block_size = state_block_size(shape, block_size)
    geometry = geometry_of(shape, block_size, dtype)
    own_geometry = geometry_of(of_rank, block_size, dtype)
    return ModelOutline(
        path="transformers",
        shape=shape,
        geometry=geometry,
        num_parameters=num_parameters,
        has_stored=bool(stored),
        gpu_weights_nbytes=nbytes,
        ranks=tuple(RankOutline(nbytes, own_geometry) for nbytes in own_nbytes),
        divides_states=bool(divided_states(of_rank, block_size)),
        encoder_nbytes=num_tower_parameters(config) * dtype.itemsize,
    )


def _gpu_nbytes(places: Mapping[str, Place], dtype: torch.dtype, quantisation: Quantisation | None) -> int:
    """Bytes of the tensors on a GPU, with the usual scales and zeros of groups."""
    bits = 0.0
    for name, place in places.items():
        is_stored = quantisation is not None and _stays(quantisation, name, place)
        of_each = quantisation.stored_bits(name) if is_stored and quantisation is not None else 8 * dtype.itemsize
        bits += math.prod(place.target.shape) * of_each
    return int(bits / 8)


def _stays(quantisation: Quantisation, name: str, place: Place) -> bool:
    """Whether a weight of a quantised checkpoint stays quantised on a GPU. The matrix that expands latents becomes
    full. An indexer's weights of heads are, and so is the product that a layer for drafting begins with."""
    if quantisation.bits is None:
        return False
    if quantisation.is_shuffled and len(place.part[-1]) < place.shape[-1]:
        return False  # only some of the inputs
    if quantisation.method == "mxfp4":
        return name.endswith((".experts.gate_up_proj", ".experts.down_proj"))
    if ".experts." in name:
        return not quantisation.is_shuffled
    full = ("kv_b_proj.weight", ".weights_proj.weight", ".eh_proj.weight")
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight", ".wq_b.weight", ".wk.weight")) and not name.endswith(
        full
    )


def _stored_names(model: PreTrainedModel, quantisation: Quantisation | None) -> frozenset[str]:
    """The weights of a transformers model that stay quantised on a GPU."""
    if quantisation is None or quantisation.bits is None:
        return frozenset()
    of_experts = {"mxfp4": {True}}.get(quantisation.method, {False} if quantisation.is_shuffled else {False, True})
    found = (path for path, one in candidates(model).items() if one in of_experts)
    return frozenset(path for path in found if not is_published_full(model, path))


def _stored_nbytes(
    parameters: Iterable[tuple[str, torch.Tensor]],
    stored: frozenset[str],
    wide: frozenset[str],
    dtype: torch.dtype,
    quantisation: Quantisation | None,
) -> int:
    """Bytes of a transformers model's parameters on a GPU. ``stored``: the names of those that stay quantised. ``wide``: of those
    in float32.
    """
    full = 8.0 * dtype.itemsize

    def bits(name: str) -> float:
        if quantisation is not None and name in stored:
            return quantisation.stored_bits(name)
        return 32.0 if name in wide else full

    return int(sum(one.numel() * bits(name) for name, one in parameters) / 8)


def check_files(directory: Path, outline: ModelOutline) -> None:
    """Check that the checkpoint's files, all of which are in ``directory``, belong to the model. Raises ModelError."""
    if outline.path == "native":
        checkpoint.check_files(directory, load_config(directory))
    else:
        loading.check_files(directory, getattr(torch, outline.shape.dtype))


def write_random_weights(directory: Path, target: Path, path: str) -> None:
    """Write a random float32 checkpoint for the model of ``directory`` into the folder ``target``. Every layer has an effect.

    ``path``: of the outline. Our own forward pass has text only, so the checkpoint is one of text, too.
    """
    config = load_full_config(directory)
    model = text_model(config.get_text_config() if path == "native" else config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    model.save_pretrained(target)


def compare(directory: Path, path: str) -> float:
    """The distance of the checkpoint's logits from transformers', relative to their size, in float32 on the CPU.

    Runs two short sequences, in chunks and batched over paged K/V. Raises ModelError if the distance is too large.
    """
    options = EngineOptions(model_dir=directory, model_id="compared", device="cpu")
    cpu = torch.device("cpu")
    if path == "transformers":
        reference = load_model(directory, torch.float32, cpu)
        plain = plain_logits(reference)
        one_block = KvPool(geometry_of(reference.shape, options.block_size, torch.float32), 1, cpu)
        reference.bind(cpu_paged_ops(options, reference.shape, one_block.tensor), torch.float32)
        return check_model(reference, plain, lambda shape, pool, *_: cpu_paged_ops(options, shape, pool), torch.float32)
    config = load_config(directory)
    weights = load_weights(directory, config, torch.float32, cpu, lambda *_: None)

    def make(_: ModelShape, pool: torch.Tensor, *sizes: int) -> tuple[Model, StepOps]:
        ops = cpu_ops(options, config, pool, LONGEST)
        return DecoderModel(config, weights, ops), ops

    return compare_native(loading.load_parameters(directory, torch.float32, cpu), config, make, torch.float32)
