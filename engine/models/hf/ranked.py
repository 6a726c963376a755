"""Loads a rank's part of a transformers model. Neither a rank's device nor its host's memory holds the whole model.

    meta     outline of the whole model ─▶ what this rank keeps of it ─▶ which first layers have one of each kind
    host     first rank: these layers whole ─▶ transformers' logits ─▶ freed
    device   each parameter is read, cut and moved ─▶ the rank's part of all layers

The check at load then compares the first layers of the ranks with those logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from kvrelay.engine.config.model import ModelShape
from kvrelay.engine.images.reader import ProcessorReader
from kvrelay.engine.models.adapters import AdaptedLayer
from kvrelay.engine.models.hf.adapters import adaptable_layers
from kvrelay.engine.models.hf.check import Plain, plain_logits
from kvrelay.engine.models.hf.check_images import ImageUse
from kvrelay.engine.models.hf.entries import CompressedLayers
from kvrelay.engine.models.hf.expert_parts import find_expert_parts
from kvrelay.engine.models.hf.gate import Layers
from kvrelay.engine.models.hf.loading import find_stored, load_first_layers, load_model, load_outline, load_parameters
from kvrelay.engine.models.hf.model import TransformersModel
from kvrelay.engine.models.hf.origins import Origin
from kvrelay.engine.models.hf.outline import NoWeights
from kvrelay.engine.models.hf.ranks.cut import settle
from kvrelay.engine.models.hf.ranks.cuts import Cuts, find_cuts
from kvrelay.engine.models.hf.ranks.kinds import first_of_each_kind
from kvrelay.engine.models.ranks import RankPart
from kvrelay.engine.weights.stored import StoredWeight

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, or a rank's part of it, with what its check compares. Call ``model.bind`` next."""

    model: TransformersModel
    shape: ModelShape  # of the whole
    cuts: Cuts
    plain: list[Plain]  # see check_model; empty on ranks other than the first
    images: ImageUse
    layers: dict[str, AdaptedLayer]  # that adapters may change
    first: tuple[str, int] | None  # what the check takes, see first_of_each_kind; None: all layers

    def checked_layers(self) -> AbstractContextManager[None]:
        """A context in which the model has the layers that the check takes."""
        return nullcontext() if self.first is None else self.model.first_layers(*self.first)


@dataclass(frozen=True, slots=True)
class ToLoad:
    """What to load, and how."""

    directory: Path
    dtype: torch.dtype
    device: torch.device
    progress: Callable[[int, int], None]  # hears (bytes loaded, bytes in all)
    reader: ProcessorReader | None  # this and the next: see ImageUse
    no_images: str
    keeps: Callable[[StoredWeight], bool] | None  # see ``load_model``
    adapts: bool  # adapters will be loaded

    @property
    def with_towers(self) -> bool:
        """Whether the model has what reads images."""
        return self.reader is not None


def load_whole(asked: ToLoad) -> LoadedModel:
    """Load the whole model to the device, where the reference of its check is computed, too. Raises ModelError."""
    given = (asked.directory, asked.dtype, asked.device, asked.progress)
    model = load_model(*given, with_towers=asked.with_towers, keeps=asked.keeps)
    plain, images = plain_logits(model), ImageUse(model, asked.reader, asked.no_images)
    layers = adaptable_layers(model, model.model) if asked.adapts else {}
    return LoadedModel(model, model.shape, Cuts({}, {}, frozenset()), plain, images, layers, None)


def load_rank(asked: ToLoad, part: RankPart) -> LoadedModel:
    """Load a rank's ``part`` to the device. Waits for all ranks at the end. Raises ModelError."""
    directory, dtype, with_towers = asked.directory, asked.dtype, asked.with_towers
    traces = asked.keeps is not None
    outline = load_outline(directory, dtype, with_towers=with_towers, traces=traces, traces_experts=True)
    with NoWeights():
        cuts = find_cuts(outline, part.cut)
    kept = find_stored(directory, outline.model, dtype, asked.keeps, partial(_part_of, cuts))
    experts = find_expert_parts(outline.model, cuts, kept.origins)
    first, plain = first_of_each_kind(outline), []
    if part.is_leader:
        if first is None:
            logger.warning("%s goes through the host's memory as a whole, for the check at load", directory)
            reference = load_model(directory, dtype, torch.device("cpu"), with_towers=with_towers)
        else:
            reference = load_first_layers(directory, dtype, *first, with_towers=with_towers)
        plain, images = plain_logits(reference), ImageUse(reference, asked.reader, asked.no_images)
        del reference
    else:
        images = ImageUse(None, None, asked.no_images)
    given = (directory, dtype, asked.device, asked.progress)
    parameters = load_parameters(*given, cuts.of, kept=kept, experts=experts, with_towers=with_towers)
    whole = TransformersModel(parameters, _layers_of(parameters, outline), outline.shape)
    model = settle(whole, cuts, part.cut)
    layers = adaptable_layers(model, outline.model) if asked.adapts else {}
    # All ranks take as many layers as the first one, which may have what encodes images.
    count = part.meet(str(first[1]).encode() if part.is_leader and first is not None else b"")
    taken = (first[0], int(count)) if first is not None and count else None
    return LoadedModel(model, outline.shape, cuts, plain, images, layers, taken)


def _part_of(cuts: Cuts, path: str, origin: Origin) -> Origin | None:
    """What a rank has of a stored parameter."""
    cut = cuts.parameters.get(path)
    return origin if cut is None else origin.part(cut.dim, cut.ranges)


def _layers_of(model: PreTrainedModel, outline: TransformersModel) -> Layers:
    """The outline's layers, in ``model``."""
    paths = {module: path for path, module in outline.model.named_modules()}

    def there(module: nn.Module) -> nn.Module:
        found: nn.Module = model.get_submodule(paths[module])
        return found

    return Layers(
        [replace(one, module=there(one.module)) for one in outline.layers],
        [replace(one, module=there(one.module), uncalled=tuple(map(there, one.uncalled))) for one in outline.states],
        None if outline.compressed is None else CompressedLayers([there(one) for one in outline.compressed.modules]),
    )
