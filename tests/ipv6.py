"""Whether this machine speaks IPv6 with itself."""

from __future__ import annotations

import socket

import pytest


def _speaks_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _speaks_ipv6(), reason="no IPv6 here")
