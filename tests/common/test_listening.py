"""The sockets of an HTTP server, with one family of addresses or both."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvrelay.common import listening
from kvrelay.common.listening import listen

from ..ipv6 import needs_ipv6


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def seen_from(listeners: list[socket.socket], host: str, opened: ExitStack) -> str:
    """The address of a client that connects to ``host``, as the server sees it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    [listener] = [one for one in listeners if one.family == family]
    opened.enter_context(socket.create_connection((host, listener.getsockname()[1])))
    connection, (client, *_) = listener.accept()
    opened.enter_context(connection)
    return str(client)


@needs_ipv6
def test_all_addresses_are_those_of_both_families(opened: ExitStack) -> None:
    listeners = [opened.enter_context(listener) for listener in listen("::", 0)]
    assert len({listener.getsockname()[1] for listener in listeners}) == 1, "one port"
    assert seen_from(listeners, "127.0.0.1", opened) == "127.0.0.1"
    assert seen_from(listeners, "::1", opened) == "::1"


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_one_address_has_one_socket(host: str, opened: ExitStack) -> None:
    listeners = [opened.enter_context(listener) for listener in listen(host, 0)]
    assert seen_from(listeners, host, opened) == host
    with pytest.raises(OSError, match="Address already in use"):
        listen(host, listeners[0].getsockname()[1])


@needs_ipv6
@pytest.mark.parametrize("taken_at", ["0.0.0.0", "::1"])
def test_a_port_that_one_family_lacks_is_taken(taken_at: str, opened: ExitStack) -> None:
    [taken] = listen(taken_at, 0)
    opened.enter_context(taken)
    with pytest.raises(OSError, match="Address already in use"):
        listen("::", taken.getsockname()[1])


@needs_ipv6
def test_a_free_port_of_one_family_that_the_other_lacks_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch, opened: ExitStack
) -> None:
    [taken] = listen("0.0.0.0", 0)
    opened.enter_context(taken)
    taken_port: int = taken.getsockname()[1]
    really, offers = listening._listen, [taken_port]

    def offering(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
        """Offers the port that is taken, as the kernel may."""
        return really(family, host, port or (offers.pop() if offers else 0))

    monkeypatch.setattr(listening, "_listen", offering)
    listeners = [opened.enter_context(listener) for listener in listen("::", 0)]
    assert offers == []
    [port] = {listener.getsockname()[1] for listener in listeners}
    assert port != taken_port
    assert len(listeners) == 2


@pytest.mark.parametrize("missing", [socket.AF_INET6, socket.AF_INET])
def test_a_machine_without_one_family_listens_on_the_other(
    missing: socket.AddressFamily, monkeypatch: pytest.MonkeyPatch, opened: ExitStack
) -> None:
    real = socket.socket

    def of_family(family: socket.AddressFamily) -> socket.socket:
        if family == missing:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(family)

    other = ({socket.AF_INET6, socket.AF_INET} - {missing}).pop()
    try:
        real(other).close()
    except OSError:
        pytest.skip(f"no {other.name} here")
    monkeypatch.setattr("kvrelay.common.listening.socket.socket", of_family)
    [listener] = listen("::", 0)
    opened.enter_context(listener)
    assert listener.family == other
