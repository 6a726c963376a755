"""Errors of the wire.

KvrelayError
└── WireError
    ├── MalformedMessageError   a frame is not a message, or too large
    ├── PeerLostError           a peer stopped answering
    ├── KeysError               a file of keys is missing, or is not what it should be
    ├── NoSharedMemoryError     two workers have no memory in common; the text says why
    ├── GreetingRefusedError    a sender's shared memory is not what it must be (see its ``cause_name``)
    └── BlockRefusedError       a KV block's proof does not hold (see its ``cause_name`` for the counter's label)
"""

from kvrelay.common.errors import KvrelayError


class WireError(KvrelayError):
    """Base of the wire's errors."""


class MalformedMessageError(WireError):
    """A frame is not a message, or exceeds a bound."""


class PeerLostError(WireError):
    """A peer stopped answering."""


class KeysError(WireError):
    """A file of keys is missing, or holds something else. The text names the file and the way out."""


class NoSharedMemoryError(WireError):
    """Two workers have no memory in common, or one does not want to. The text says why."""


class _RefusedError(WireError):
    """``cause_name`` is a short stable word for metrics."""

    def __init__(self, cause_name: str, detail: str) -> None:
        super().__init__(detail)
        self.cause_name = cause_name


class GreetingRefusedError(_RefusedError):
    """What a sender offers as shared memory is not taken."""


class BlockRefusedError(_RefusedError):
    """A KV block was refused."""
