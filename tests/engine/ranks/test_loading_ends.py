"""A load of several ranks ends at once when one of them cannot load, although the others read on for minutes."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from kvrelay.common.errors import ModelError
from kvrelay.engine.ranks.engine import RankedEngine, Ranks
from kvrelay.engine.ranks.link import Link
from kvrelay.engine.ranks.messages import FromRank, LoadSettings, NotLoaded, Ready
from kvrelay.engine.ranks.rank import Rank
from kvrelay.engine.settings import KvSettings, ModelSettings
from tests.engine.conftest import SIZES, save_model

from .rig import SOON_S, pids, wait_until

LOADER = "ranks-loader"


@pytest.fixture
def settings(tmp_path: Path) -> LoadSettings:
    """Of a model of two ranks."""
    save_model(tmp_path, transformers.LlamaConfig(**SIZES))
    model = ModelSettings(model=str(tmp_path), device="cpu", tensor_parallel=2, threads=2)
    return LoadSettings(model, KvSettings(num_blocks=8), 4, None, decodes=True)


def is_loading() -> bool:
    return any(thread.name == LOADER for thread in threading.enumerate())


def expect_end(settings: LoadSettings, load_part: Callable[..., Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        RankedEngine.load(settings, load_part, lambda done, total: None)


def test_a_rank_that_cannot_load_ends_the_load_of_a_leader_that_does_not_hear(
    settings: LoadSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.engine.ranks.loading._END_S", 0.1)
    (Path(settings.model.model) / "config.json").write_text("{}")
    over = threading.Event()

    def loads_for_long(part: Any, _progress: Any) -> Any:
        over.wait(SOON_S)
        part.meet()

    began_s = time.monotonic()
    expect_end(settings, loads_for_long, r"^rank 1 \(process \d+\) cannot load its part: .*config\.json")
    assert time.monotonic() - began_s < SOON_S / 2, "it was noticed only when the leader had loaded"
    assert is_loading(), "the leader was not reading any more"
    over.set()
    wait_until(lambda: not is_loading(), "the thread has not ended at the next meeting")
    assert not pids()


def test_a_rank_that_is_killed_while_it_loads_ends_the_load_of_a_leader_that_reports_progress(
    settings: LoadSettings,
) -> None:
    killed: list[int] = []

    def reads(part: Any, progress: Any) -> Any:
        killed.extend(pids())
        os.kill(killed[0], signal.SIGKILL)
        end_s = time.monotonic() + SOON_S
        while time.monotonic() < end_s:
            progress(1, 2)

    expect_end(settings, reads, r"^rank 1 \(process \d+\) was ended by SIGKILL$")
    assert not is_loading()
    assert killed
    assert not pids()


def test_an_error_of_the_leader_is_its_own(settings: LoadSettings) -> None:
    def refuses(part: Any, progress: Any) -> Any:
        raise ModelError("no such layer")

    expect_end(settings, refuses, r"^no such layer$")
    assert not pids()


def test_the_leader_hears_how_far_a_rank_has_read(settings: LoadSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Ranks] = []
    joins = Ranks.join

    def join(ranks: Ranks, given: Any) -> Any:
        started.append(ranks)
        return joins(ranks, given)

    def waits(part: Any, progress: Any) -> Any:
        wait_until(lambda: started[0].others[0].share_read == 1, "the rank has not read its weights")
        raise ModelError("heard")

    monkeypatch.setattr(Ranks, "join", join)
    expect_end(settings, waits, "^heard$")


class Played(Rank):
    """A rank without a process."""

    def __init__(self, rank: int, on_lost: Callable[[Rank], None]) -> None:
        ours, theirs = socket.socketpair()
        self.end: Link[Any] = Link(theirs, FromRank)
        super().__init__(rank, "played", Link(ours, FromRank), on_lost, lambda _: None)

    def kill(self) -> None:
        self.end.shut()

    def part(self, *_: Any) -> Any:
        raise NotImplementedError

    def _end(self) -> None:
        self.end.close()

    def _how_it_ended(self, reason: EOFError) -> str:
        return "was ended by SIGKILL"


@pytest.fixture
def ranks() -> Iterator[tuple[list[Rank], list[Played]]]:
    """Two ranks, and those that are lost, in their order."""
    lost: list[Rank] = []
    made = [Played(rank, lost.append) for rank in (1, 2)]
    yield lost, made
    for one in made:
        one.close()


def test_the_rank_that_died_is_the_cause_and_not_one_whose_collective_failed_first(ranks: Any) -> None:
    lost, (waited, died) = ranks
    waited.end.send(NotLoaded("RuntimeError: connection closed by peer", may_be_theirs=True))
    waited.end.shut()
    died.end.shut()
    wait_until(lambda: len(lost) == 2, "the ranks are not lost")
    assert [one.lost for one in lost] == [
        "rank 2 (played) was ended by SIGKILL",
        "rank 1 (played) cannot load its part: RuntimeError: connection closed by peer",
    ]


def test_a_rank_that_refuses_its_part_is_lost_before_it_ends(ranks: Any) -> None:
    lost, (first, _) = ranks
    first.end.send(NotLoaded("a file is truncated", may_be_theirs=False))
    wait_until(lambda: lost, "the rank is not lost")
    assert lost[0].lost == "rank 1 (played) cannot load its part: a file is truncated"


def test_a_rank_that_reads_on_is_waited_for(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, (slow, hangs) = ranks
    num_waits = 0

    def take(_timeout_s: float) -> Ready | None:
        nonlocal num_waits
        num_waits += 1
        slow.share_read += 0.3  # what the last sign of life said
        return Ready() if num_waits == 3 else None

    monkeypatch.setattr(slow, "take", take)
    assert isinstance(slow.take_while_reading(600.0), Ready)
    assert num_waits == 3
    assert hangs.take_while_reading(0.1) is None
