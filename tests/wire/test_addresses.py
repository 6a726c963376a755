"""How a process reaches an address."""

from __future__ import annotations

import pytest

from kvrelay.wire.addresses import data_address


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
