"""How many files and connections a process may have open.

Most systems start processes with a small limit (1,024) that each may raise by itself up to a large one. Every connection takes one
descriptor, strangers' too; when there is none left, honest peers are not let in either, and ZeroMQ's network thread asks for the
waiting connection over and over, at the cost of a core, until a descriptor is free.
"""

from __future__ import annotations

import resource

_ENOUGH = 65_536  # not all that there may be: a connection in its handshake takes some 20 KB, and a crowd's must fit


def raise_descriptor_limit() -> int:
    """Raise this process's limit to what it may have, at most 65,536; returns the limit that is in force. Never lowers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _ENOUGH
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)
