"""How a process reaches an address."""

from __future__ import annotations

import pytest

from kvrelay.wire.addresses import data_address, is_ipv6, with_brackets


@pytest.mark.parametrize(
    ("control", "announced", "expected"),
    [
        ("tcp://10.0.0.7:7200", "tcp://0.0.0.0:7201", "tcp://10.0.0.7:7201"),
        ("tcp://[fd00::1]:7200", "tcp://[::]:7201", "tcp://[fd00::1]:7201"),
        ("tcp://10.0.0.7:7200", "tcp://10.9.9.9:7201", "tcp://10.9.9.9:7201"),
        ("tcp://decode-0.svc:7200", "ipc:///tmp/x", "ipc:///tmp/x"),
    ],
)
def test_blocks_go_where_the_worker_was_reached(control: str, announced: str, expected: str) -> None:
    assert data_address(control, announced) == expected


@pytest.mark.parametrize(
    ("address", "expected", "ipv6"),
    [
        ("tcp://fd00::7:7200", "tcp://[fd00::7]:7200", True),
        ("tcp://::1:0", "tcp://[::1]:0", True),
        ("tcp://[fd00::7]:7200", "tcp://[fd00::7]:7200", True),
        ("tcp://10.0.0.7:7200", "tcp://10.0.0.7:7200", False),
        ("tcp://decode-0.svc:7200", "tcp://decode-0.svc:7200", False),
        ("ipc:///tmp/a:b:c", "ipc:///tmp/a:b:c", False),
    ],
)
def test_an_address_of_ipv6_gets_its_brackets(address: str, expected: str, ipv6: bool) -> None:
    assert with_brackets(address) == expected
    assert is_ipv6(expected) == ipv6
