"""PeerError: the only error of this folder.

It is raised when a side cannot be started, does not become ready, or does not answer.
"""

from __future__ import annotations

from kvrelay.common.errors import KvrelayError


class PeerError(KvrelayError):
    """A side does not run or does not answer; the text says which, and where its log is."""
