"""What is made while nobody waits for it: once, behind what runs, and its errors come out where it is asked for."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.gateway.soon import Soon


async def two_rounds() -> None:
    """The loop goes round: what is due, and what that calls up."""
    for _ in range(2):
        await asyncio.sleep(0)


async def test_it_is_made_behind_what_runs_and_once() -> None:
    done: list[str] = []

    def make() -> object:
        done.append("made")
        return object()

    soon = Soon(make)
    task = asyncio.create_task(asyncio.sleep(0, done.append("sent on")))
    await two_rounds()
    assert done == ["sent on", "made"]
    assert soon.get() is soon.get()
    assert done == ["sent on", "made"]
    await task


async def test_who_cannot_wait_makes_it() -> None:
    done: list[str] = []
    soon = Soon(lambda: done.append("made"))
    soon.get()
    assert done == ["made"]
    await two_rounds()
    assert done == ["made"]


async def test_what_goes_wrong_is_told_to_who_asks(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> None:
        raise ValueError("no such parser")

    soon = Soon(make)
    await two_rounds()
    assert not caplog.records
    for _ in range(2):
        with pytest.raises(ValueError, match="no such parser"):
            soon.get()
