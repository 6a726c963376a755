"""Errors of the launcher.

KvrelayError
└── LauncherError
    ├── PortTakenError      an address that we need belongs to another process
    ├── ComponentDiedError  a component died at start, or too often
    ├── NotReadyError       the components did not become ready in the time given
    ├── DownloadError       a model cannot be fetched
    ├── AnswerError         a server does not answer, or not as an OpenAI-compatible one does
    ├── BenchError          a benchmark, or the file of its result, cannot be made or read (a request that fails is part of it)
    └── VerifyError         a comparison could not be made at all (a difference is no error but a result)
"""

from kvrelay.common.errors import KvrelayError


class LauncherError(KvrelayError):
    """Base of the launcher's errors."""


class PortTakenError(LauncherError):
    """The text names the address and the way out."""


class ComponentDiedError(LauncherError):
    """The text names the component, how it ended, and its last log lines."""


class NotReadyError(LauncherError):
    """The text names who is not ready, and for how long we waited."""


class DownloadError(LauncherError):
    """The text names the model and the way out."""


class AnswerError(LauncherError):
    """The text names the server and the way out."""


class BenchError(LauncherError):
    """The text names the file, or the option that is to change."""


class VerifyError(LauncherError):
    """The text says what is missing."""
