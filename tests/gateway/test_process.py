"""What one of a gateway's processes takes of the whole's bounds. Its life is tests/gateway/test_processes.py's."""

from __future__ import annotations

from kvrelay.common.settings import build
from kvrelay.gateway.process import part, share_of
from kvrelay.gateway.settings import GatewaySettings


def test_parts_of_a_bound_add_up() -> None:
    for whole in range(1, 30):
        for count in range(1, whole + 1):
            parts = [part(whole, index, count) for index in range(count)]
            assert sum(parts) == whole
            assert max(parts) - min(parts) <= 1
    assert [part(2, index, 4) for index in range(4)] == [1, 1, 1, 1]  # nobody can serve nothing
    settings = build(GatewaySettings, {"workers": 4, "max_queued": 10, "max_connections": 7})
    shares = [share_of(settings, index, 4) for index in range(4)]
    assert [share.relay.max_queued for share in shares] == [3, 3, 2, 2]
    assert [share.http.max_connections for share in shares] == [2, 2, 2, 1]
