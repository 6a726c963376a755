"""What goes wrong beside copies to and from the host's memory: wrong bytes, distrusted workers, copies that fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .host_rig import BLOCK, WAYS, Rig, tokens_of


@pytest.mark.parametrize("at", ["begin", "wait"])
@pytest.mark.parametrize("way", WAYS)
def test_a_block_that_the_pool_takes_in_the_midst_of_its_copy_is_not_kept(
    way: str, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content that another text has written to the block must not be found under the first one's hash."""
    rig = Rig(way=way)
    first, second = tokens_of(1, 8), tokens_of(2, 8)
    rig.compute(first)
    _interrupt(rig, lambda: rig.compute(second), at, monkeypatch)
    rig.work()
    assert rig.told == {"missed": 8, "kept": 8}  # those of the second text
    rig.compute(tokens_of(3, 8))
    assert rig.fetch(first) is not None
    assert rig.told["returned"] == 0
    rig.fetch(second)
    assert rig.compute(second) == 8
    rig.check()


def _interrupt(rig: Rig, act: Callable[[], object], at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let something happen once, when copies out have begun (``at`` "begin": the first one), before any is waited for."""
    out = rig.tier._out
    done: list[bool] = []

    def once() -> None:
        if not done:
            done.append(True)
            act()

    if at == "wait":
        finish = out._finish
        monkeypatch.setattr(out, "_finish", lambda *args: (once(), finish(*args)))
    else:
        open_next = out._open_next

        def opened() -> object:
            copy = open_next()
            once()
            return copy

        monkeypatch.setattr(out, "_open_next", opened)


@pytest.mark.parametrize("way", WAYS)
def test_bytes_that_changed_in_the_hosts_memory_are_not_used(way: str, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(way=way)
    text = tokens_of(1, 6)
    rig.compute(text)
    rig.work()
    rig.compute(tokens_of(2, 8))
    rig.work()
    wrong = rig.tier._kept.by_group[0][rig.hashes(text)[3]]
    wrong.memory[17] ^= 4
    rig.fetch(text)
    assert (rig.told["wrong"], rig.told["returned"], rig.told["tokens"]) == (1, 5, 3 * BLOCK)
    assert "came back from the host's memory with other bytes" in caplog.text
    assert rig.compute(text) == 3
    rig.check()
    rig.work()
    assert rig.tier.num_kept == 6 + 8  # it is kept anew


@pytest.mark.parametrize("way", ["hashing", "direct"])
def test_bytes_that_a_copy_changes_are_found(way: str) -> None:
    """In either direction: the device's digests are of the pool's memory, before the copy out and after the copy in."""
    rig = Rig(way=way)
    device = rig.device
    assert device is not None
    text, other = tokens_of(1, 6), tokens_of(2, 6)
    device.flips = True
    rig.compute(text)
    rig.work()
    device.flips = False
    rig.compute(other)
    rig.work()
    rig.compute(tokens_of(3, 8))
    rig.fetch(text)
    assert (rig.told["wrong"], rig.told["returned"]) == (6, 0)
    device.flips = True
    rig.fetch(other)
    assert (rig.told["wrong"], rig.told["returned"]) == (12, 0)
    rig.check()


@pytest.mark.parametrize("way", WAYS)
def test_what_a_distrusted_worker_computed_leaves_the_tier(way: str) -> None:
    rig = Rig(way=way)
    rig.compute(tokens_of(1, 3), source="wrong")
    rig.compute(tokens_of(2, 3), source="right")
    rig.work()
    rig.compute(tokens_of(3, 8))
    rig.work()
    coming = rig.tier.fetch(rig.hashes(tokens_of(1, 3)))
    assert coming is not None
    rig.blocks.distrust("wrong")  # also what is on its way
    rig.work()
    assert coming.is_done
    assert rig.tier.num_kept == 3 + 8
    assert rig.compute(tokens_of(1, 3)) == 0
    rig.fetch(tokens_of(2, 3))
    assert rig.blocks.distrust("right")[0] == 3  # what came back has kept its source
    rig.check()


@pytest.mark.parametrize("at", ["before", "within"])
def test_what_is_copied_while_its_worker_becomes_distrusted_is_not_kept(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a copy ends while the pool's blocks are dropped."""
    rig = Rig(way="direct")
    rig.compute(tokens_of(1, 3), source="wrong")
    if at == "before":
        _interrupt(rig, lambda: rig.blocks.distrust("wrong"), "wait", monkeypatch)
    else:
        distrust = rig.blocks._physical.distrust
        monkeypatch.setattr(rig.blocks._physical, "distrust", lambda source: (rig.work(), distrust(source))[1])
        rig.blocks.distrust("wrong")
    rig.work()
    assert rig.tier.num_kept == 0
    rig.check()


def test_what_comes_back_while_its_worker_becomes_distrusted_is_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(way="direct")
    rig.compute(tokens_of(1, 3), source="wrong")
    rig.work()
    rig.compute(tokens_of(3, 8))
    land = rig.tier._land
    monkeypatch.setattr(rig.tier, "_land", lambda *args: (land(*args), rig.blocks.distrust("wrong")))
    rig.fetch(tokens_of(1, 3))
    assert rig.told["returned"] == 3
    assert rig.blocks.num_cached_prefix(rig.hashes(tokens_of(1, 3))) == 0
    rig.check()


@pytest.mark.parametrize("at", ["out", "in"])
@pytest.mark.parametrize("way", ["staged", "hashing", "direct"])
def test_a_copy_that_fails_ends_the_tier_and_nothing_else(way: str, at: str) -> None:
    rig = Rig(way=way)
    device = rig.device
    assert device is not None
    text, fetches = tokens_of(1, 6), []
    rig.compute(text)
    if at == "in":
        rig.work()
        rig.compute(tokens_of(2, 2))
        rig.work()
        rig.compute(tokens_of(3, 8))
        fetches = [rig.tier.fetch(rig.hashes(one)) for one in (text, tokens_of(2, 2))]
    device._is_broken = True
    rig.tier.start()
    rig.tier._thread.join(10)
    assert not rig.tier._thread.is_alive()
    assert all(one is not None and one.is_done for one in fetches)
    later = rig.tier.fetch(rig.hashes(text))
    assert later is not None
    assert later.is_done
    rig.check()
    rig.tier.close()
    rig.check()


def test_an_unfinished_fetch_is_over_when_the_tier_closes() -> None:
    rig = Rig()
    text = tokens_of(1, 6)
    rig.compute(text)
    rig.work()
    rig.compute(tokens_of(2, 8))
    fetch = rig.tier.fetch(rig.hashes(text))
    assert fetch is not None
    rig.tier.close()
    assert (fetch.is_done, rig.num_returned) == (True, 1)
    rig.check()
    rig.compute(text)  # the block manager goes on
    assert rig.tier.num_queued == 0


def test_a_tier_that_is_over_takes_no_blocks_of_the_pool() -> None:
    """What it had does not come any more. The pool's cached blocks must not leave for it."""
    rig = Rig(way="direct")
    text, other = tokens_of(1, 6), tokens_of(2, 8)
    rig.compute(text)
    rig.work()
    rig.compute(other)
    rig.tier.close()
    fetch = rig.tier.fetch(rig.hashes(text))
    assert fetch is not None
    assert fetch.is_done
    assert rig.tier.num_kept == 0
    assert rig.compute(other) == 8
    rig.check()


def test_a_prompt_does_not_wait_for_ever_whatever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    text = tokens_of(1, 6)
    rig.compute(text)
    rig.work()
    rig.compute(tokens_of(2, 8))
    fetch = rig.tier.fetch(rig.hashes(text))
    assert fetch is not None

    def wait() -> bytes:
        raise TypeError("a bug")

    monkeypatch.setattr(rig.pool, "begin_write", lambda *_: wait)
    rig.tier.start()
    rig.tier._thread.join(10)
    assert not rig.tier._thread.is_alive()
    assert fetch.is_done
    rig.check()


def test_every_published_block_is_kept_or_counted_as_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that found no slot of staging in time."""
    rig = Rig(way="staged")
    monkeypatch.setattr("kvrelay.engine.kv.host.copies_out._SLOT_S", 0.0)
    monkeypatch.setattr(rig.pool._staging, "_wait_for_slot", lambda *_: False)
    rig.compute(tokens_of(1, 6))
    rig.work()
    assert rig.told == {"missed": 6}
    rig.check()
