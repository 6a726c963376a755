"""What the processes of a gateway share: counts, and the API keys' limits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvrelay.gateway import shared_memory
from kvrelay.gateway.errors import TooManyRequestsError
from kvrelay.gateway.key_limits import KeyLimits, KeyUse, OwnCounts
from kvrelay.gateway.shared_memory import SharedMemory


@contextmanager
def mapped(num_processes: int) -> Iterator[list[SharedMemory]]:
    """The parent's mapping, then one of each process."""
    parent = SharedMemory.create(num_processes)
    children = [SharedMemory(os.dup(parent.descriptor), num_processes) for _ in range(num_processes)]
    try:
        yield [parent, *children]
    finally:
        for memory in (parent, *children):
            memory.close()


def test_fewest_connections_are_those_of_who_accepts_any() -> None:
    with mapped(3) as (parent, first, second, third):
        assert parent.fewest_connections() is None
        first.set_connections(0, 5)
        second.set_connections(1, 2)
        assert third.fewest_connections() == 2
        assert parent.connections(2) is None
        third.set_connections(2, 0)
        assert first.fewest_connections() == 0
        third.set_connections(2, None)
        parent.forget(1)
        assert first.fewest_connections() == 5


def test_a_limit_of_requests_at_a_time_is_one_for_all_processes() -> None:
    limits = KeyLimits(concurrency=3)
    with mapped(2) as (parent, first, second):
        here, there = KeyUse(first.key_counts("alice", 0)), KeyUse(second.key_counts("alice", 1))
        here.enter(limits, 0.0)
        there.enter(limits, 0.0)
        there.enter(limits, 0.0)
        for use in (here, there):
            with pytest.raises(TooManyRequestsError, match="3 requests running"):
                use.enter(limits, 0.0)
        KeyUse(first.key_counts("bob", 0)).enter(limits, 0.0)  # another key's are its own
        here.leave()
        there.enter(limits, 0.0)
        parent.forget(1)  # the process that had all three has died
        for _ in range(3):
            here.enter(limits, 0.0)
        with pytest.raises(TooManyRequestsError):
            here.enter(limits, 0.0)


def test_a_bucket_is_one_for_all_processes_and_outlives_them() -> None:
    limits = KeyLimits.parse({"requests_per_s": "2", "burst": "3"})
    with mapped(2) as (parent, first, second):
        here, there = KeyUse(first.key_counts("alice", 0)), KeyUse(second.key_counts("alice", 1))
        here.enter(limits, 100.0)
        there.enter(limits, 100.0)
        parent.forget(1)
        here.enter(limits, 100.0)
        with pytest.raises(TooManyRequestsError, match="2 times a second, 3 at once") as refusal:
            KeyUse(second.key_counts("alice", 1)).enter(limits, 100.0)
        assert refusal.value.retry_after_s == pytest.approx(0.5)
        there.enter(limits, 100.5)
        with pytest.raises(TooManyRequestsError):
            here.enter(limits, 100.5)


def test_processes_that_race_for_the_last_place_never_both_get_it() -> None:
    """Real processes, each entering as often as it may: together exactly as often as the limit says."""
    program = """
import sys
from kvrelay.gateway.errors import TooManyRequestsError
from kvrelay.gateway.key_limits import KeyLimits, KeyUse
from kvrelay.gateway.shared_memory import SharedMemory
index, descriptor, limit = map(int, sys.argv[1:])
use = KeyUse(SharedMemory(descriptor, 3).key_counts("alice", index))
print("ready", flush=True)
sys.stdin.readline()
num_entered = 0
while True:
    try:
        use.enter(KeyLimits(concurrency=limit), 0.0)
    except TooManyRequestsError:
        break
    num_entered += 1
print(num_entered)
"""
    limit = 3000
    with mapped(3) as (parent, *_):
        racers = [
            subprocess.Popen(
                [sys.executable, "-P", "-c", program, str(index), str(parent.descriptor), str(limit)],
                pass_fds=(parent.descriptor,),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for index in range(3)
        ]
        numbers: list[int] = []
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("\n")
            racer.stdin.flush()
        for racer in racers:
            out, _ = racer.communicate(timeout=60)
            numbers.append(int(out))
        assert sum(numbers) == limit, numbers


def test_who_stopped_with_the_lock_stops_nobody_else() -> None:
    program = """
import fcntl, sys
fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX, 0, 0)
print("held", flush=True)
sys.stdin.readline()
"""
    with mapped(1) as (parent, mine):
        holder = subprocess.Popen(
            [sys.executable, "-c", program, str(parent.descriptor)],
            pass_fds=(parent.descriptor,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        use = KeyUse(mine.key_counts("alice", 0))
        use.enter(KeyLimits(concurrency=1), 0.0)
        with pytest.raises(TooManyRequestsError):
            use.enter(KeyLimits(concurrency=1), 0.0)
        holder.communicate("\n", timeout=20)


def test_more_keys_than_there_is_room_for_are_counted_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_memory, "_MAX_KEYS", 4)
    with mapped(1) as (_, mine):
        for name in "abcd":
            mine.key_counts(name, 0).add_running(1)
        assert [mine.key_counts(name, 0).num_running() for name in "dcba"] == [1, 1, 1, 1]
        assert isinstance(mine.key_counts("e", 0), OwnCounts)
        assert "the limits of e hold for each process by itself" in caplog.text
