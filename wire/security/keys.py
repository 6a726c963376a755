"""Keys of the roles on the wire: one Ed25519 key pair for each role, in PEM files.

A directory of keys holds ``ROLE.pem``, the public key (or a certificate that has it) of each role, and ``ROLE.key``, the private
key, for ``gateway``, ``prefill`` and ``decode``; a process gets its own private key and all public ones. A certificate is read for
its key only: names, dates and signatures of it mean nothing here, what lies in the directory is trusted.

CURVE wants X25519 keys. An Ed25519 key is one, too, by the map between the two forms of the curve (RFC 7748, section 4.1; the
private key as in RFC 8032, section 5.1.5), which libsodium and others use for the same purpose. Keys are made as Ed25519
because that is what Helm, openssl and cert-manager can make.

Several keys in one ``ROLE.pem``: all of them are that role, so that keys can be changed under traffic.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import zmq
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from zmq.utils import z85

from kvrelay.common.errors import SettingsError
from kvrelay.wire.addresses import is_local
from kvrelay.wire.errors import KeysError
from kvrelay.wire.messages import Role
from kvrelay.wire.settings import SecuritySettings

_FIELD = 2**255 - 19
_BEGIN, _END = b"-----BEGIN ", b"-----END "


@dataclass(frozen=True, slots=True)
class WireKeys:
    """What one process has. Keys are X25519, in the Z85 text that ZeroMQ takes."""

    public: bytes
    secret: bytes
    peers: Mapping[Role, tuple[bytes, ...]]  # public keys of each role

    def __repr__(self) -> str:
        """Without the secret: settings and errors get logged."""
        return f"WireKeys(public={self.public.decode()})"

    def role_of(self, public: bytes) -> Role | None:
        """The role that has this key; None if no role has it."""
        return next((role for role, keys in self.peers.items() if public in keys), None)

    def derived(self, purpose: str) -> bytes:
        """32 secret bytes for ``purpose``, equal in all processes that have the same private key."""
        return HKDF(SHA256(), 32, salt=None, info=f"kvrelay {purpose}".encode()).derive(z85.decode(self.secret))

    @classmethod
    def load(cls, directory: Path, role: Role) -> WireKeys:
        """The keys of a process of ``role``. Raises KeysError naming the file that does not fit."""
        peers = {each: _read_public(directory / f"{each.value}.pem") for each in Role}
        path = directory / f"{role.value}.key"
        secret = _read_private(path)
        public = zmq.curve_public(secret)
        if public not in peers[role]:
            raise KeysError(f"{path} belongs to no key in {directory / role.value}.pem; make both by kvrelay keys")
        return cls(public, secret, peers)


def keys_of(settings: SecuritySettings, role: Role, listening_on: tuple[str, ...]) -> WireKeys | None:
    """The keys that a worker's settings name; None if they name none.

    Raises KeysError, and SettingsError if an address that it listens on can be reached from outside and there are no keys.
    """
    if settings.keys is not None:
        return WireKeys.load(Path(settings.keys), role)
    exposed = [address for address in listening_on if not is_local(address)]
    if exposed and not settings.insecure:
        raise SettingsError(
            f"{', '.join(exposed)} can be reached from other machines, and without --keys anybody there could read, forge "
            "and cancel requests: make keys (kvrelay keys), listen on 127.0.0.1, or say --insecure in a network of your own"
        )
    return None


def make_keys(directory: Path) -> list[Path]:
    """Make new keys for all roles; returns the files. Private ones are readable by their owner only.

    Raises KeysError if a file is there already or cannot be written: nothing is overwritten.
    """
    files = {role: (directory / f"{role.value}.key", directory / f"{role.value}.pem") for role in Role}
    paths = [path for pair in files.values() for path in pair]
    existing = [str(path) for path in paths if path.exists()]
    if existing:
        raise KeysError(f"{', '.join(existing)} would be overwritten; name another directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for private_path, public_path in files.values():
            key = Ed25519PrivateKey.generate()
            private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            with open(os.open(private_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(private)
            public_path.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    except OSError as error:
        raise KeysError(f"cannot write keys to {directory}: {error}") from error
    return paths


def _read_private(path: Path) -> bytes:
    try:
        key = load_pem_private_key(_read(path), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise KeysError(f"{path} holds no private key in PEM without a password; make one by kvrelay keys") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise KeysError(f"{path} holds a {type(key).__name__}; it must be Ed25519 (kvrelay keys makes one)")
    return z85.encode(hashlib.sha512(key.private_bytes_raw()).digest()[:32])


def _read_public(path: Path) -> tuple[bytes, ...]:
    keys: list[bytes] = []
    for block in _read(path).split(_BEGIN)[1:]:
        body = _BEGIN + block.partition(_END)[0] + _END + block.partition(_END)[2].partition(b"-----")[0] + b"-----\n"
        try:
            key = (
                x509.load_pem_x509_certificate(body).public_key()
                if block.startswith(b"CERTIFICATE")
                else load_pem_public_key(body)
            )
        except (ValueError, UnsupportedAlgorithm) as error:
            raise KeysError(f"{path} holds something that is no public key or certificate in PEM: {error}") from error
        if not isinstance(key, Ed25519PublicKey):
            raise KeysError(f"{path} holds a {type(key).__name__}; it must be Ed25519 (kvrelay keys makes one)")
        keys.append(_to_x25519(key, path))
    if not keys:
        raise KeysError(f"{path} holds no public key; make one by kvrelay keys")
    return tuple(keys)


def _to_x25519(key: Ed25519PublicKey, path: Path) -> bytes:
    """u = (1 + y) / (1 - y)"""
    y = int.from_bytes(key.public_bytes_raw(), "little") & (2**255 - 1)
    if (1 - y) % _FIELD == 0:
        raise KeysError(f"{path} holds the neutral element, which is nobody's key")
    u = (1 + y) * pow(1 - y, -1, _FIELD) % _FIELD
    return z85.encode(u.to_bytes(32, "little"))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise KeysError(
            f"cannot read the key {path}: {error.strerror}; --keys names the directory of a role's keys"
        ) from error
