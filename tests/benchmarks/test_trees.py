from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from peers.trees import PeerError, ProcessTree

# A parent that ignores SIGTERM, with a child in its own session, as a server may be.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[ProcessTree]:
    command = (sys.executable, "-c", STUBBORN)
    started = ProcessTree("stubborn", command, environment={}, log=tmp_path / "log")
    yield started
    started.stop(grace_s=0.0)


def child_of(tree: ProcessTree) -> psutil.Process:
    deadline_s = time.monotonic() + 20
    while not (told := tree.log.read_text()):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)  # polls for the child's pid, until the deadline above
    return psutil.Process(int(told))


def test_stop_ends_every_descendant_whatever_it_ignores(tree: ProcessTree) -> None:
    child = child_of(tree)
    assert {tree.process.pid, child.pid} <= set(tree.pids())
    tree.stop(grace_s=0.1)
    assert tree.pids() == []
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert tree.process.returncode is not None


def test_a_child_whose_parent_has_died_is_still_ended(tree: ProcessTree) -> None:
    child = child_of(tree)
    tree.pids()
    tree.process.kill()
    tree.process.wait()
    assert child.pid in tree.pids()
    tree.stop(grace_s=0.1)
    assert tree.pids() == []


def test_pause_stops_all_and_resume_undoes_it(tree: ProcessTree) -> None:
    child = child_of(tree)
    tree.pause()
    os.waitid(os.P_PID, tree.process.pid, os.WSTOPPED | os.WNOWAIT)
    assert psutil.Process(tree.process.pid).status() == psutil.STATUS_STOPPED
    tree.resume()
    os.waitid(os.P_PID, tree.process.pid, os.WCONTINUED | os.WNOWAIT)
    assert child.is_running()


def test_processes_are_bound_by_a_word_of_their_command_with_all_their_threads(tree: ProcessTree) -> None:
    child = child_of(tree)
    core = min(os.sched_getaffinity(0))
    assert tree.bind("import time; time.sleep(600)", [core]) == 1
    assert {frozenset(os.sched_getaffinity(thread.id)) for thread in child.threads()} == {frozenset({core})}
    assert tree.bind("no such word", [core]) == 0


def test_a_paused_tree_can_be_stopped(tree: ProcessTree) -> None:
    child_of(tree)
    tree.pause()
    tree.stop(grace_s=0.1)
    assert tree.pids() == []


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="there is no /nowhere/vllm"):
        ProcessTree("vllm", ("/nowhere/vllm",), environment={}, log=tmp_path / "log")


def test_the_end_of_the_log_is_told_when_a_program_has_ended(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import sys; sys.exit('no memory')")
    tree = ProcessTree("vllm", command, environment={}, log=tmp_path / "log")
    tree.process.wait()
    with pytest.raises(PeerError, match=r"ended with status 1.*\n.*no memory"):
        tree.check_alive()
    tree.stop(grace_s=0.0)


def test_a_program_runs_in_the_folder_of_its_log_not_in_ours(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import os, sys; sys.exit(os.getcwd())")
    tree = ProcessTree("vllm", command, environment={}, log=tmp_path / "log")
    tree.process.wait()
    tree.stop(grace_s=0.0)
    assert (tmp_path / "log").read_text().split() == [str(tmp_path)]
