"""Adapters (LoRA) in a model: products that add the adapters' outputs for a step's rows.

A *site* is a product of the model, perhaps of several linear layers side by side, such as q, k and v. Sites exist if the engine was
started for adapters. In a step without adapters they cost one comparison with ``None``. An adapter occupies a *slot*: its matrices
for all sites, of which any may be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvrelay.common.adapter_files import CONFIG_FILE, AdapterError, AdapterFiles, LowRankHeader, require_digest
from kvrelay.engine.models.low_rank import NUM_ADAPTER_SLOTS, LowRankProducts, TokenGroups
from kvrelay.engine.models.ops import Linear
from kvrelay.engine.step.batch import Batch
from kvrelay.engine.weights.adapters import AdapterReader, LowRank


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A linear layer of the checkpoint in a site. If the model is cut among ranks: this rank's part of the layer."""

    module: str  # its name in the checkpoint, without ".weight"
    num_outputs: int  # of the whole layer
    num_inputs: int
    outputs: range  # the part of the layer that is here
    inputs: range
    other_names: tuple[str, ...] = ()  # by which adapters may call it, too


class Adapters:
    """All adapters of an engine. Implements :class:`kvrelay.engine.step.interface.AdapterSlots`.

    Sites are made together with the model. ``load`` and ``unload`` may be called beside steps, on one thread at a time.
    """

    def __init__(
        self,
        products: LowRankProducts,
        dtype: torch.dtype,
        device: torch.device,
        is_elsewhere: Callable[[str], bool] = lambda module: False,
    ) -> None:
        """``is_elsewhere``: whether a module is in another stage's layers; the ranks of that stage check it."""
        self._is_elsewhere = is_elsewhere
        self._products = products
        self._dtype = dtype
        self._device = device
        self._sites: list[tuple[AdaptedLayer, ...]] = []
        self._loaded: set[int] = set()
        self.is_on = False  # whether some row of the step has an adapter

    @property
    def num_slots(self) -> int:
        """See AdapterSlots."""
        return NUM_ADAPTER_SLOTS

    def nbytes(self, files: AdapterFiles) -> int:
        """See AdapterSlots."""
        return files.num_parameters * self._dtype.itemsize

    def adapted(self, linear: Linear, *layers: AdaptedLayer) -> Linear:
        """``linear``, whose outputs are those of ``layers`` side by side, plus what adapters add."""
        site = len(self._sites)
        self._sites.append(layers)
        self._products.add_site(len(layers[0].inputs), [len(layer.outputs) for layer in layers])

        def product(hidden: torch.Tensor) -> torch.Tensor:
            out = linear(hidden)
            if self.is_on:
                self._products.add(site, hidden, out)
            return out

        return product

    def begin_step(self, batch: Batch) -> None:
        """Prepare for ``batch``. Raises ValueError if a row's slot has no adapter."""
        groups = self.groups_of(batch)
        self.is_on = groups is not None
        self._products.begin_step(groups)

    def groups_of(self, batch: Batch) -> TokenGroups | None:
        """See TokenGroups.of. Raises ValueError if a row's slot has no adapter."""
        groups = TokenGroups.of(batch)
        if groups is not None and not self._loaded.issuperset(groups.slots.tolist()):
            raise ValueError(f"rows with adapters in slots {groups.slots.tolist()}; there are {sorted(self._loaded)}")
        return groups

    def load(self, slot: int, directory: Path, digest: str) -> None:
        """See AdapterSlots."""
        assert 1 <= slot <= NUM_ADAPTER_SLOTS, f"slot {slot}; there are 1 to {NUM_ADAPTER_SLOTS}"
        assert slot not in self._loaded, f"slot {slot} has an adapter"
        try:
            try:
                self._put(slot, directory)
            finally:
                # Checked after reading, so that the files that were read (or were broken) are those of the digest.
                require_digest(directory, digest)
        except BaseException:
            self._products.drop(slot)
            raise
        self._loaded.add(slot)

    def unload(self, slot: int) -> None:
        """See AdapterSlots."""
        self._loaded.remove(slot)
        self._products.drop(slot)

    def _put(self, slot: int, directory: Path) -> None:
        files = AdapterFiles.read(directory)
        headers = self._fitting(files)
        with AdapterReader(files, self._dtype, self._device) as reader:
            for site, layers in enumerate(self._sites):
                self._products.put(slot, site, self._parts(layers, headers, reader))

    def _fitting(self, files: AdapterFiles) -> Mapping[str, LowRankHeader]:
        """An adapter's layers by our names. Raises AdapterError if this model lacks one, or has it with another shape."""
        every = (layer for site in self._sites for layer in site)
        layers = {name: layer for layer in every for name in (layer.module, *layer.other_names)}
        fitting: dict[str, LowRankHeader] = {}
        for header in files.layers:
            if self._is_elsewhere(header.module):
                continue
            layer = layers.get(header.module)
            if layer is None:
                raise AdapterError(
                    f"{files.weights_path}: there is no {header.module} in this model that an adapter may change; it is for "
                    f"another base ({CONFIG_FILE} names it), or adapts embeddings, experts or the head, which is not served"
                )
            shape, ours = (header.num_outputs, header.num_inputs), (layer.num_outputs, layer.num_inputs)
            if shape != ours:
                raise AdapterError(
                    f"{files.weights_path}: {header.module} is for a base of shape {shape}; this model's is {ours}: the adapter is "
                    f"for another base ({CONFIG_FILE} names it)"
                )
            if layer.module in fitting:
                raise AdapterError(
                    f"{files.weights_path}: {header.module} is another name of a layer that it also calls "
                    f"{fitting[layer.module].module}; save the adapter with one of them"
                )
            fitting[layer.module] = header
        return fitting

    def _parts(
        self, layers: Sequence[AdaptedLayer], headers: Mapping[str, LowRankHeader], reader: AdapterReader
    ) -> list[LowRank | None]:
        parts: list[LowRank | None] = []
        start = 0
        for layer in layers:
            header = headers.get(layer.module)
            parts.append(None if header is None else reader.read(header, start, layer.outputs, layer.inputs))
            start += len(layer.outputs)
        return parts
