"""Encrypts a stream between two hosts of one worker, with keys agreed on at its beginning.

Each end sends a public key made for this stream (X25519). From both keys and the shared secret, each end derives one key per
direction (HKDF, AES-256-GCM, a counter as nonce). An end with another secret can neither read nor seal: the first message that does
not open ends the stream. Recorded streams stay unreadable even if the secret becomes known.
"""

from __future__ import annotations

import socket

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

_GREETING = b"kvrelay ranks 1\n"
_KEY_NBYTES = 32
_NONCE_NBYTES = 12


class Seal:
    """One end's seal. Each direction belongs to one thread at a time."""

    def __init__(self, sending: bytes, receiving: bytes) -> None:
        """Keys of 32 bytes."""
        self._sending, self._receiving = AESGCM(sending), AESGCM(receiving)
        self._num_sent = self._num_received = 0

    def close(self, message: bytes) -> bytes:
        """Seal ``message`` as the next message of this end."""
        nonce = self._num_sent.to_bytes(_NONCE_NBYTES, "big")
        self._num_sent += 1
        return self._sending.encrypt(nonce, message, None)

    def open(self, sealed: bytes | bytearray) -> bytes:
        """Open the next message of the other end. Raises EOFError if it is not that; after that nothing can be opened."""
        nonce = self._num_received.to_bytes(_NONCE_NBYTES, "big")
        self._num_received += 1
        try:
            return self._receiving.decrypt(nonce, sealed, None)
        except InvalidTag as error:
            raise EOFError("the other end has another secret: both need the same --keys, or none") from error


def agree(stream: socket.socket, secret: bytes, *, calls: bool) -> Seal:
    """Both ends call this first; one of them ``calls``. Waits for the stream's timeout. Raises OSError or EOFError."""
    own = X25519PrivateKey.generate()
    public = own.public_key().public_bytes_raw()
    stream.sendall(_GREETING + public)
    greeting = _exactly(stream, len(_GREETING) + _KEY_NBYTES)
    if not greeting.startswith(_GREETING):
        raise EOFError("the other end is no rank of this version")
    others = greeting[len(_GREETING) :]
    caller, called = (public, others) if calls else (others, public)
    try:
        shared = own.exchange(X25519PublicKey.from_public_bytes(others))
    except ValueError as error:  # a point of low order
        raise EOFError("the other end has sent no key") from error
    derived = HKDF(SHA256(), 2 * _KEY_NBYTES, salt=secret, info=_GREETING + caller + called).derive(shared)
    of_caller, of_called = derived[:_KEY_NBYTES], derived[_KEY_NBYTES:]
    return Seal(of_caller, of_called) if calls else Seal(of_called, of_caller)


def _exactly(stream: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = stream.recv(size - len(data))
        if not more:
            raise EOFError("the other end is gone")
        data += more
    return data
