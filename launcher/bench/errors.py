"""What keeps a benchmark from being run at all. A request that fails is no error here but part of the result.

KvrelayError
└── LauncherError
    └── BenchError          the server, the trace or a generator process
"""

from __future__ import annotations

from kvrelay.launcher.errors import LauncherError


class BenchError(LauncherError):
    """The text names the server or the file, and the way out."""
