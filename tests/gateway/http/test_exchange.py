"""Gathered writes of streams: each connection's parts are written together, in order, and before what follows."""

from __future__ import annotations

import asyncio
from typing import Any

from kvrelay.gateway.http.sse import Exchange, GatheredWrites

from ..http_port import Connection


def connections(count: int) -> tuple[list[Any], list[tuple[str, bytes]]]:
    log: list[tuple[str, bytes]] = []
    return [Connection(str(number), log) for number in range(count)], log


async def turn_of_the_loop() -> None:
    await asyncio.sleep(0)


async def test_parts_of_one_go_are_written_behind_it_and_those_of_a_connection_together() -> None:
    (one, other), log = connections(2)
    writes = GatheredWrites()
    for cycle, part in ((one, b"a"), (other, b"b"), (one, b"c")):
        writes.add(cycle, part)
    assert log == []
    await turn_of_the_loop()
    assert log == [("0", b"ac"), ("1", b"b")]
    writes.add(other, b"d")  # in a later turn of the loop
    await turn_of_the_loop()
    assert log[2:] == [("1", b"d")]


async def test_many_streams_do_not_wait_for_all_others() -> None:
    cycles, log = connections(100)
    writes = GatheredWrites()
    num_written = []
    for cycle in cycles:
        writes.add(cycle, b"x")
        num_written.append(len(log))
    assert max(number - written for number, written in enumerate(num_written, start=1)) < 32
    await turn_of_the_loop()
    assert [name for name, _ in log] == [cycle.name for cycle in cycles]


async def test_a_connection_is_not_given_any_number_of_parts_before_it_can_say_that_it_is_full() -> None:
    (cycle,), log = connections(1)
    exchange = Exchange(cycle, GatheredWrites())
    num_taken = 0
    while exchange.write(b"x") and num_taken < 100:
        num_taken += 1
        cycle.flow.write_paused = bool(log)  # the connection is full after one write
    assert num_taken == 8
    await turn_of_the_loop()
    assert log == [("0", b"1\r\nx\r\n" * 8)]


async def test_nothing_is_written_to_a_connection_that_ended_meanwhile() -> None:
    (gone, other), log = connections(2)
    writes = GatheredWrites()
    writes.add(gone, b"a")
    writes.add(other, b"b")
    gone.closing = True
    await turn_of_the_loop()
    assert log == [("1", b"b")]


async def test_a_connection_that_cannot_be_written_to_costs_no_other_one_anything() -> None:
    (broken, other), log = connections(2)
    broken.write = None  # writing raises
    writes = GatheredWrites()
    writes.add(broken, b"a")
    writes.add(other, b"b")
    await turn_of_the_loop()
    assert log == [("1", b"b")]
    assert broken.closing
