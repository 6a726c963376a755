"""Errors of the launcher.

KvrelayError
└── LauncherError
    ├── PortTakenError      a needed address belongs to another process
    ├── ComponentDiedError  a component died at start, or too often
    ├── NotReadyError       the components did not become ready in time
    ├── DownloadError       a model cannot be downloaded
    ├── AnswerError         a server does not answer, or not as an OpenAI-compatible server
    ├── BenchError          a benchmark cannot run, or its result file cannot be read (failed requests are a result)
    └── VerifyError         a comparison could not be made (a difference is a result)
"""

import json

from kvrelay.common.errors import KvrelayError


class LauncherError(KvrelayError):
    """Base of the launcher's errors."""


class PortTakenError(LauncherError):
    """The message names the address and what to do."""


class ComponentDiedError(LauncherError):
    """The message names the component, how it ended, and its last log lines."""


class NotReadyError(LauncherError):
    """The message names the components that are not ready, and the time waited."""


class DownloadError(LauncherError):
    """The message names the model and what to do."""


class AnswerError(LauncherError):
    """The message names the server and what to do."""


def refused(url: str, status: int, body: bytes, *, wants_operator: bool = False) -> AnswerError:
    """The error of an answer with an error's status: the server's reason, and the way out if it wants a key.

    ``wants_operator``: only operators may ask there.
    """
    try:
        reason = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        reason = body[:500].decode(errors="replace") or "no reason given"
    way_out = ""
    if status in (401, 403):
        kind = "an operator's API key" if wants_operator or status == 403 else "an API key of this server"
        way_out = f"; set KVRELAY_API_KEY, or --api-key, to {kind}"
    return AnswerError(f"{url} answered {status}: {reason}{way_out}")


class BenchError(LauncherError):
    """The message names the file, or the option to change."""


class VerifyError(LauncherError):
    """The message says what is missing."""
