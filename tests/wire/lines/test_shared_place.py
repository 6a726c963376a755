"""Where workers on one host find each other's sockets, and which settings and names are valid."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import build
from kvrelay.decode_worker.settings import DecodeSettings
from kvrelay.prefill_worker.settings import PrefillSettings
from kvrelay.wire.errors import NoSharedMemoryError
from kvrelay.wire.lines.shared.place import SharedPlace
from kvrelay.wire.settings import SameHostSettings


def test_auto_is_the_abstract_namespace_and_off_is_no_place() -> None:
    place = SharedPlace.of(SameHostSettings())
    assert place == SharedPlace()
    name = SharedPlace().new_name()
    assert SharedPlace().address(name) == "\0" + name[1:]
    assert SharedPlace.of(SameHostSettings("off")) is None


@pytest.mark.parametrize("settings", [PrefillSettings, DecodeSettings])
def test_both_workers_have_the_setting(settings: type[PrefillSettings] | type[DecodeSettings]) -> None:
    built = build(settings, {"shared-memory": "off", "model": "demo"})
    assert built.same_host.shared_memory == "off"
    assert build(settings, {"model": "demo"}).same_host.shared_memory == "auto"


def test_a_directory_may_have_another_path_on_the_other_side(socket_directory: Path) -> None:
    (socket_directory / "here").mkdir()
    place = SharedPlace.of(SameHostSettings(str(socket_directory / "here")))
    assert place is not None
    name = place.new_name()
    assert "/" not in name
    assert SharedPlace(socket_directory / "there").address(name) == str(socket_directory / "there" / name)


def test_names_do_not_come_twice() -> None:
    assert len({SharedPlace().new_name() for _ in range(100)}) == 100


@pytest.mark.parametrize("text", ["relative", "", "/nowhere/at/all", "/etc/passwd"])
def test_what_is_no_directory_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(SettingsError, match="must be auto, off, or the absolute path of a directory that exists"):
        SharedPlace.of(SameHostSettings(text))


def test_a_path_too_long_for_a_socket_is_refused_with_the_limit(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    with pytest.raises(SettingsError, match="has at most 71 bytes"):
        SharedPlace.of(SameHostSettings(str(deep)))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "@",
        "@other-abc",
        "kvrelay-a",
        "../kvrelay-a.sock",
        "kvrelay-a/../b.sock",
        "/run/kvrelay-a.sock",
        "@kvrelay-a\0b",
    ],
)
@pytest.mark.parametrize("place", [SharedPlace(), SharedPlace(Path("/run"))])
def test_a_peer_cannot_name_just_any_socket(name: str, place: SharedPlace) -> None:
    with pytest.raises(NoSharedMemoryError, match="is no name of a decode worker's socket"):
        place.address(name)


def test_two_workers_with_different_settings_are_told() -> None:
    abstract, file = SharedPlace(), SharedPlace(Path("/run"))
    with pytest.raises(NoSharedMemoryError, match="auto at the decode worker and a directory here"):
        file.address(abstract.new_name())
    with pytest.raises(NoSharedMemoryError, match="a directory at the decode worker and auto here"):
        abstract.address(file.new_name())


def test_only_sockets_of_killed_workers_are_swept(socket_directory: Path) -> None:
    place = SharedPlace(socket_directory)
    old_s = time.time() - 3600
    names = {what: place.new_name() for what in ("dead", "live", "young")}
    sockets = {what: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for what in names}
    for what, name in names.items():
        sockets[what].bind(place.address(name))
    sockets["live"].listen()
    for what in ("dead", "young"):
        sockets[what].close()
    (socket_directory / "kvrelay-file.sock").write_text("no socket")
    (socket_directory / "other").write_text("not ours")
    for path in socket_directory.iterdir():
        if path.name != names["young"]:
            os.utime(path, (old_s, old_s))
    place.sweep()
    assert {path.name for path in socket_directory.iterdir()} == {
        names["live"],
        names["young"],
        "kvrelay-file.sock",
        "other",
    }
    sockets["live"].close()


def test_there_is_nothing_to_sweep_in_the_abstract_namespace() -> None:
    SharedPlace().sweep()
