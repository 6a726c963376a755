"""Processes with fake components: start, watch, restart and stop."""

from __future__ import annotations

import os
import select
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from kvrelay.launcher.errors import ComponentDiedError, NotReadyError
from kvrelay.launcher.local.process import ComponentSpec, describe_exit
from kvrelay.launcher.local.supervisor import RestartPolicy, State, Status, Supervisor
from tests.launcher.conftest import MakeSpec

QUICK = RestartPolicy(first_pause_s=0.01, longest_pause_s=0.02, stable_s=60.0, max_deaths=3)


class Recorder:
    """An observer that lets a test wait for a state."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.states: list[tuple[str, State]] = []
        self._changed = threading.Condition()

    def on_line(self, name: str, line: str) -> None:
        self.lines.append(f"{name}: {line}")

    def on_state(self, status: Status) -> None:
        with self._changed:
            self.states.append((status.name, status.state))
            self._changed.notify_all()

    def wait_for(self, name: str, state: State, count: int = 1) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.states.count((name, state)) >= count, 20), self.states


def supervised(specs: list[ComponentSpec], recorder: Recorder, policy: RestartPolicy = QUICK) -> Supervisor:
    supervisor = Supervisor(specs, policy=policy, tick_s=0.02)
    supervisor.start(recorder)
    return supervisor


def tell_to_die(spec: ComponentSpec) -> None:
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        urllib.request.urlopen(spec.ready_url.replace("/health/ready", "/die"), timeout=60)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def assert_all_gone(pids: list[int]) -> None:
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_components_become_ready_and_stop_in_the_order_of_their_ranks(
    make_spec: MakeSpec, recorder: Recorder, tmp_path: Path
) -> None:
    specs = [make_spec("decode-0", stop_rank=2), make_spec("prefill-0", stop_rank=1), make_spec("gateway", stop_rank=0)]
    supervisor = supervised(specs, recorder)
    supervisor.wait_ready(20)
    statuses = supervisor.statuses()
    assert [status.state for status in statuses] == [State.READY] * 3
    assert all(status.rss_bytes and status.load_s is not None for status in statuses)
    pids = [status.pid for status in statuses if status.pid is not None]
    assert len(pids) == 3
    assert all(os.getsid(pid) == pid for pid in pids), "Ctrl-C at the terminal must reach the launcher only"
    assert supervisor.stop(20)
    assert (tmp_path / "stopped").read_text().split() == ["gateway", "prefill-0", "decode-0"]
    assert [status.state for status in supervisor.statuses()] == [State.STOPPED] * 3
    assert_all_gone(pids)


def test_a_command_that_does_not_exist_is_a_death_at_start(recorder: Recorder) -> None:
    spec = ComponentSpec(name="ghost", command=("/no/such/program",), ready_url="http://127.0.0.1:9/")
    supervisor = supervised([spec], recorder)
    with pytest.raises(ComponentDiedError, match=r"ghost died at start[^$]*/no/such/program|No such file"):
        supervisor.wait_ready(20)
    assert supervisor.stop(20)


def test_a_component_that_breaks_off_its_answer_is_asked_again(make_spec: MakeSpec, recorder: Recorder) -> None:
    supervisor = supervised([make_spec("gateway", "breaks off at first")], recorder)
    supervisor.wait_ready(20)
    assert supervisor.stop(20)


def test_a_component_that_dies_later_is_restarted(make_spec: MakeSpec, recorder: Recorder) -> None:
    spec, other = make_spec("decode-0"), make_spec("gateway")
    supervisor = supervised([spec, other], recorder)
    supervisor.wait_ready(20)
    before = {status.name: status.pid for status in supervisor.statuses()}
    tell_to_die(spec)
    recorder.wait_for("decode-0", State.DIED)
    recorder.wait_for("decode-0", State.READY, count=2)
    after = {status.name: status for status in supervisor.statuses()}
    assert after["decode-0"].num_restarts == 1
    told = [state for name, state in recorder.states if name == "decode-0"]
    assert told == [State.LOADING, State.READY, State.DIED, State.LOADING, State.READY], "each change is told once"
    assert after["decode-0"].pid != before["decode-0"]
    assert after["gateway"].pid == before["gateway"], "the others keep running"
    assert supervisor.stop(20)


def test_a_component_that_is_ready_once_more_has_not_loaded_again(
    make_spec: MakeSpec, recorder: Recorder, tmp_path: Path
) -> None:
    spec = make_spec("gateway")
    supervisor = supervised([spec], recorder)
    supervisor.wait_ready(20)
    assert [status.is_back for status in supervisor.statuses()] == [False]
    (tmp_path / "unready").touch()
    recorder.wait_for("gateway", State.UNREADY)
    (tmp_path / "unready").unlink()
    recorder.wait_for("gateway", State.READY, count=2)
    assert [status.is_back for status in supervisor.statuses()] == [True]
    tell_to_die(spec)
    recorder.wait_for("gateway", State.READY, count=3)
    assert [status.is_back for status in supervisor.statuses()] == [False], "a new process has loaded"
    assert supervisor.stop(20)


def test_too_many_deaths_in_a_row_end_the_deployment(make_spec: MakeSpec, recorder: Recorder) -> None:
    spec = make_spec("decode-0", "dies at restart")
    supervisor = supervised([spec], recorder)
    supervisor.wait_ready(20)
    tell_to_die(spec)
    with pytest.raises(ComponentDiedError, match=r"decode-0 died 3 times in a row \(last: exit code 3\)"):
        supervisor.wait_ended(20)
    assert supervisor.stop(20)


def test_deaths_soon_after_a_component_was_ready_are_in_a_row(make_spec: MakeSpec, recorder: Recorder) -> None:
    supervisor = supervised([make_spec("decode-0", "dies when ready")], recorder)
    with pytest.raises(ComponentDiedError, match=r"decode-0 died 3 times in a row"):
        supervisor.wait_ended(20)
    assert supervisor.stop(20)


def test_a_component_that_ignores_sigterm_is_killed_after_its_grace(make_spec: MakeSpec, recorder: Recorder) -> None:
    supervisor = supervised([make_spec("decode-0", "stubborn", grace_s=0.1)], recorder)
    supervisor.wait_ready(20)
    pids = [status.pid for status in supervisor.statuses() if status.pid]
    assert supervisor.stop(20)
    assert_all_gone(pids)


def test_stop_while_it_loads(make_spec: MakeSpec, recorder: Recorder) -> None:
    supervisor = supervised([make_spec("decode-0", "never ready")], recorder)
    with pytest.raises(NotReadyError, match=r"not ready after 0 s: decode-0 \(loading\)"):
        supervisor.wait_ready(0.1)
    assert supervisor.stop(20)
    assert supervisor.stop(20), "again does nothing"


def test_what_a_component_started_ends_with_it(recorder: Recorder, tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! > {tmp_path}/pid; exit 4"
    supervisor = supervised([ComponentSpec("parent", ("/bin/sh", "-c", script), "http://127.0.0.1:9/")], recorder)
    with pytest.raises(ComponentDiedError, match="exit code 4"):
        supervisor.wait_ready(20)
    supervisor.stop(20)
    pid = int((tmp_path / "pid").read_text())
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended, _, _ = select.select([descriptor], [], [], 20)
    os.close(descriptor)
    assert ended


def test_pauses_grow_to_their_bound_and_end() -> None:
    policy = RestartPolicy(first_pause_s=1, longest_pause_s=3, max_deaths=5)
    assert [policy.pause_s(count) for count in range(1, 6)] == [1, 2, 3, 3, None]


def test_how_a_process_ended_is_told_in_words() -> None:
    assert describe_exit(1) == "exit code 1"
    assert describe_exit(-11) == "killed by SIGSEGV"
    assert describe_exit(-9) == "killed by SIGKILL (out of memory? see dmesg)"
