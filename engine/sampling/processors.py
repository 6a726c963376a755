"""The operator's logits processors: named Python callables that a request may select. Code never comes from a client.

A package registers them as entry points of the group ``kvrelay.logits_processors``::

    [project.entry-points."kvrelay.logits_processors"]
    no-digits = "our_processors:no_digits"

A worker started with ``--logits-processors no-digits`` loads them once. It refuses requests that name any other. Prefill and decode
workers need the same ones, because both sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol

from kvrelay.common.errors import SettingsError

if TYPE_CHECKING:
    import torch

    from kvrelay.engine.sampling.bitmask import Upload
    from kvrelay.engine.sampling.rows import Asking

GROUP = "kvrelay.logits_processors"


class LogitsProcessor(Protocol):
    """Changes the logits of all rows of a step that select it, in one call.

    A row's result may depend only on its own logits and tokens; otherwise an answer would depend on the rest of the batch. It may
    not depend on anything that differs between workers or over time; otherwise another attempt could not continue the first.
    Forbidden tokens (-inf) stay forbidden, whatever the processor does. It runs on the model thread between model and draw, so the
    whole batch waits for it. If it raises, the step fails with all its requests.
    """

    def __call__(self, logits: torch.Tensor, token_ids: Seq[Seq[int]]) -> None:
        """Change ``logits`` ``[n, vocab]`` fp32 on the model's device in place. ``token_ids``: prompt and output of each row."""


def load_processors(names: Seq[str]) -> dict[str, LogitsProcessor]:
    """Load the processors with these names.

    Raises SettingsError if one is not registered, is registered twice, or cannot be imported.
    """
    processors: dict[str, LogitsProcessor] = {}
    for name in names:
        found = list(entry_points(group=GROUP, name=name))
        if not found:
            known = ", ".join(sorted({entry.name for entry in entry_points(group=GROUP)})) or "none at all"
            raise SettingsError(
                f"--logits-processors names {name!r}, which no installed package registers under {GROUP}; registered are: {known}"
            )
        if len({entry.value for entry in found}) > 1:
            values = " and ".join(sorted({entry.value for entry in found}))
            raise SettingsError(f"--logits-processors names {name!r}, which is registered as {values}; uninstall one")
        try:
            processor = found[0].load()
        except Exception as error:  # the operator's module may raise anything
            raise SettingsError(
                f"--logits-processors: {name!r} ({found[0].value}) cannot be loaded: {error!r}"
            ) from error
        if not callable(processor):
            raise SettingsError(f"--logits-processors: {name!r} ({found[0].value}) is {processor!r}, not a callable")
        processors[name] = processor
    return processors


def run_processors(
    logits: torch.Tensor, asking: Asking, processors: Mapping[str, LogitsProcessor], upload: Upload
) -> None:
    """Apply to each row of ``logits`` ``[num_rows, vocab]`` fp32 its processors, in its order, in place.

    Waits for the device only if a processor does.
    """
    import numpy as np  # noqa: PLC0415 - a fake engine loads no processors, and may lack it

    place = 0
    while True:
        rows_of: dict[str, list[int]] = {}
        for row, sequence in enumerate(asking.sequences):
            if place < len(sequence.sampling.processors):
                rows_of.setdefault(sequence.sampling.processors[place], []).append(row)
        if not rows_of:
            return
        for name, rows in rows_of.items():
            (index,) = upload((np.array(rows, dtype=np.int64),))
            picked = logits[index]
            processors[name](picked, [asking.sequences[row].token_ids for row in rows])
            logits[index] = picked
        place += 1
