"""Reads a rank's part of parameters that stack experts' matrices. transformers would first stack all of them, whole.

    meta     transformers stacks tensors without numbers ─▶ the matrices of each parameter ─▶ the rank's part of each matrix
    device   memory for the part ◀── the rank's part of each matrix, from its file

So a rank holds its part of a layer's experts, and one matrix. Where a file has all experts in one tensor, transformers copies none,
and there is nothing to do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from kvrelay.engine.models.hf.origins import Origin, Rows, Traced
from kvrelay.engine.models.hf.ranks.cuts import Cuts
from kvrelay.engine.weights.reader import CheckpointReader

_OF_AN_EXPERT = re.compile(r"experts\.\d+\.")


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """Parameters that are read matrix by matrix."""

    origins: Mapping[str, Origin]  # by path: what the rank has of each
    dtypes: Mapping[str, torch.dtype]
    sources: frozenset[str]  # tensors of the checkpoint that nothing else needs
    share: float  # of the whole model's numbers, those of the whole parameters


NO_EXPERTS = ExpertParts({}, {}, frozenset(), 0.0)


def of_single_experts(reader: CheckpointReader) -> frozenset[str]:
    """The matrices of a checkpoint that belong to one expert each: trace them for :func:`find_expert_parts`."""
    return frozenset(
        name for name, header in reader.headers.items() if len(header.shape) == 2 and _OF_AN_EXPERT.search(name)
    )


def find_expert_parts(model: nn.Module, cuts: Cuts, kept: Collection[str]) -> ExpertParts:
    """What a rank reads matrix by matrix, of a model that was loaded from :class:`Traced` tensors.

    ``kept``: paths of parameters that stay stored.
    """
    parameters = dict(model.named_parameters())
    traced = {path: one for path, one in parameters.items() if isinstance(one, Traced) and path not in kept}
    origins: dict[str, Origin] = {}
    for path, cut in cuts.parameters.items():
        parameter = traced.get(path)
        if parameter is None or parameter.origin is None or not parameter.origin.is_stack:
            continue
        part = parameter.origin.part(cut.dim, cut.ranges)
        if part is not None:
            origins[path] = part
    # What another parameter needs as a whole is read as a whole.
    others = frozenset().union(*(one.sources for path, one in traced.items() if path not in origins))
    origins = {path: part for path, part in origins.items() if traced[path].sources.isdisjoint(others)}
    sources = frozenset().union(*(traced[path].sources for path in origins))
    num_numbers = sum(one.numel() for one in parameters.values())
    share = sum(parameters[path].numel() for path in origins) / num_numbers
    return ExpertParts(origins, {path: traced[path].dtype for path in origins}, sources, share)


def put_expert_parts(
    model: nn.Module,
    parts: ExpertParts,
    reader: CheckpointReader,
    device: torch.device,
    progress: Callable[[float], None],
) -> None:
    """Give the model the parameters, on ``device``. ``reader``: reads to it. ``progress`` hears which share of them is read."""
    for number, (path, origin) in enumerate(parts.origins.items(), 1):
        module, _, name = path.rpartition(".")
        part = _read(origin, parts.dtypes[path], reader, device)
        setattr(model.get_submodule(module), name, nn.Parameter(part, requires_grad=False))
        progress(number / len(parts.origins))


def _read(origin: Origin, dtype: torch.dtype, reader: CheckpointReader, device: torch.device) -> torch.Tensor:
    """``[experts, outputs, inputs]``, or transposed."""
    num_outs, num_ins = sum(len(rows.outs) for rows in origin.matrices[0]), len(origin.rows[0].ins)
    size = (num_ins, num_outs) if origin.is_transposed else (num_outs, num_ins)
    memory = torch.empty((len(origin.matrices), *size), dtype=dtype, device=device)
    for expert, matrix in zip(memory, origin.matrices, strict=True):
        outs, start = expert.T if origin.is_transposed else expert, 0
        for rows in matrix:
            end = start + len(rows.outs)
            outs[start:end].copy_(_rows(reader, rows))
            start = end
    return memory


def _rows(reader: CheckpointReader, rows: Rows) -> torch.Tensor:
    return reader.part(rows.name, (rows.outs, rows.ins))
