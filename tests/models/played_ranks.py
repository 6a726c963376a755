"""An engine of several ranks that are threads of the test's own process: processes would import torch for each type anew.

Models are cut, and blocks put together, as with processes. Only who tells whom is played: each step goes to all threads at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from kvrelay.common.model_card import ModelCard
from kvrelay.engine.config.cut import cuts_of
from kvrelay.engine.kv.division import division_of
from kvrelay.engine.kv.gathered import GatheredStore, HostPart
from kvrelay.engine.models.ranks import RankPart
from kvrelay.engine.step.interface import LaunchedStep
from kvrelay.engine.step.plan import StepPlan
from kvrelay.engine.torch_engine import TorchEngine
from kvrelay.engine.transformers_engine import load_transformers_engine

from .test_types import options_of

T = TypeVar("T")
_SOON_S = 120.0


class _Board:
    """Where ranks lay down what they have, and see what all have. Between that one thread runs at a time, as loading changes what
    belongs to the process.
    """

    def __init__(self, num_ranks: int) -> None:
        self._laid: list[Any] = [None] * num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=_SOON_S)
        self.turn = threading.Lock()  # of the thread that runs

    def exchange(self, rank: int, what: Any) -> list[Any]:
        """Lay down ``what``; returns what every rank has. Others run meanwhile."""
        self._laid[rank] = what
        self._wait()
        seen = list(self._laid)
        self._wait()
        return seen

    def _wait(self) -> None:
        self.turn.release()
        try:
            self._barrier.wait()
        finally:
            self.turn.acquire()

    def abort(self) -> None:
        """A rank has failed: those that wait for it get an error."""
        self._barrier.abort()


class PlayedCollectives:
    """Implements :class:`kvrelay.engine.models.ranks.Collectives` for one thread."""

    def __init__(self, board: _Board, rank: int) -> None:
        self._board = board
        self._rank = rank

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """See Collectives."""
        parts = self._board.exchange(self._rank, partial.clone())
        assert len({part.shape for part in parts}) == 1, "ranks sum tensors of unequal shapes"
        return partial.copy_(torch.stack(parts).sum(0))

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Collectives."""
        return tensor.copy_(self._board.exchange(self._rank, tensor.clone())[0])

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """See Collectives."""
        return self._board.exchange(self._rank, part.clone())

    def least(self, number: int) -> int:
        """See Collectives."""
        return int(min(self._board.exchange(self._rank, number)))

    def meet(self, told: bytes = b"") -> bytes:
        """See Meet."""
        return bytes(self._board.exchange(self._rank, told)[0])


class ThreadedRanks:
    """Implements what :class:`tests.models.test_kernels.Run` asks of an engine."""

    def __init__(self, directory: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        for registry in (AttentionInterface, AttentionMaskInterface):
            _register_by_thread(registry, monkeypatch)
        # A probe is registered, and used, on one thread: each rank needs its own.
        self._threads = [ThreadPoolExecutor(1) for _ in range(num_ranks)]
        self._board = _Board(num_ranks)
        cuts = cuts_of(num_ranks, 1)

        def load(rank: int) -> TorchEngine:
            links = PlayedCollectives(self._board, rank)
            part = RankPart(cuts[rank], links, links.meet, num_ranks)
            return load_transformers_engine(options_of(directory, **changes), lambda done, total: None, part)

        self.ranks: list[TorchEngine] = []
        try:
            self.ranks = self._on_all(load)
        except BaseException:
            self.close()
            raise
        own, geometry = self.ranks[0], self.ranks[0].card.layout.geometry
        assert all(one.card == own.card for one in self.ranks)
        parts = [HostPart(one.blocks.numpy()) for one in self.ranks]
        num_blocks = own.card.num_blocks * len(geometry.groups)
        division = division_of(geometry, own.own_geometry, own.divided_states)
        self.store = GatheredStore(geometry, num_blocks, parts, division=division)

    @property
    def card(self) -> ModelCard:
        """See Engine."""
        return self.ranks[0].card

    @property
    def num_slots(self) -> int:
        """See Engine."""
        return self.ranks[0].num_slots

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """See Engine."""
        return self._on_all(lambda rank: self.ranks[rank].launch(plan))[0]

    def __enter__(self) -> ThreadedRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads."""
        for one in self._threads:
            one.shutdown()

    def _on_all(self, act: Callable[[int], T]) -> list[T]:
        """What ``act`` gives for each rank. Raises the earliest error: those behind it may be of ranks that waited for its rank."""
        errors: list[BaseException] = []

        def guarded(rank: int) -> T:
            with self._board.turn:
                try:
                    return act(rank)
                except BaseException as error:
                    errors.append(error)
                    self._board.abort()
                    raise

        futures = [thread.submit(guarded, rank) for rank, thread in enumerate(self._threads)]
        wait(futures)
        for error in errors:
            raise error
        return [future.result() for future in futures]


def _register_by_thread(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' registries are of the whole process. Let each thread find what it has registered itself."""
    own, register = threading.local(), registry.register.__func__

    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        return vars(own)[name](*args, **kwargs)

    def registered(cls: Any, name: str, function: Any) -> None:
        vars(own)[name] = function
        register(cls, name, lambda *args, **kwargs: call(name, *args, **kwargs))

    monkeypatch.setattr(registry, "register", classmethod(registered))
