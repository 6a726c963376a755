"""Whether a worker can listen on an address is found out without disturbing anybody."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvrelay.common.errors import SettingsError
from kvrelay.wire.sockets import check_listenable

from ..ipv6 import needs_ipv6

IPV6 = [pytest.param(host, marks=needs_ipv6) for host in ("[::1]", "::1")]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "*", *IPV6])
def test_a_free_address_is_free_afterwards(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as chosen:
        chosen.bind(("::1" if ":" in host else "127.0.0.1", 0))
        port = chosen.getsockname()[1]
    for _ in range(2):
        check_listenable(f"tcp://{host}:{port}", "--address")
    with socket.create_server(("::1" if ":" in host else "127.0.0.1", port), family=family):
        pass


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"--address: cannot listen on tcp://192\.0\.2\.1:7100 \("):
        check_listenable("tcp://192.0.2.1:7100", "--address")


def test_a_path_stays_with_the_process_that_listens_there(tmp_path: Path) -> None:
    path = tmp_path / "worker"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        inode = path.stat().st_ino
        check_listenable(f"ipc://{path}", "--address")
        assert path.stat().st_ino == inode
