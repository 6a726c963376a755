"""The certificate of the HTTP API, from two PEM files that may be replaced at any time.

cert-manager, ``kubectl`` and certbot renew certificates by writing new files. The gateway loads them into the server's one SSL
context: new connections use them, existing connections keep the old ones. If new files are broken or do not match, the error is
logged, and the certificate read last stays in force.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from kvrelay.common.errors import SettingsError
from kvrelay.gateway.http.api_keys import version_of

logger = logging.getLogger(__name__)


class Certificate:
    """A certificate and its key, from two files. The constructor raises SettingsError if they cannot be used."""

    def __init__(self, cert: Path, key: Path) -> None:
        self._cert = cert
        self._key = key
        # The version is taken before the files are read, so that a change in between is seen at the next look.
        self._version = version_of(cert, key)
        self.context = _context(cert, key)

    async def look_again(self) -> None:
        """Read the files if they have changed. Call this now and then, on the loop that accepts connections."""
        version = version_of(self._cert, self._key)
        if version == self._version:
            return
        self._version = version
        try:
            # Another context tries the files first: a context that loads a certificate without its key loses the key that
            # it had.
            _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self._cert, self._key)
            _load(self.context, self._cert, self._key)
            logger.info("read a new certificate from %s", self._cert)
        except SettingsError as error:
            logger.error("%s; the certificate read before stays in force", error)


def _context(cert: Path, key: Path) -> ssl.SSLContext:
    """TLS 1.2 or newer with this certificate. Raises SettingsError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load(context, cert, key)
    return context


def _load(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    """Load the files. Raises SettingsError naming the file at fault."""
    for flag, path in (("--tls-cert", cert), ("--tls-key", key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise SettingsError(f"{flag}: cannot read {path}: {error.strerror}") from error
    try:
        context.load_cert_chain(cert, key, password=_no_passphrase)
    except _EncryptedKeyError as error:
        raise SettingsError(f"--tls-key: {key} wants a passphrase; give a key without one") from error
    except OSError as error:  # ssl.SSLError is one
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            raise SettingsError(f"--tls-key: {key} is not the key of the certificate in {cert}") from error
        raise SettingsError(
            f"--tls-cert: {cert} and {key} are not a certificate and its key in PEM ({error})"
        ) from error


class _EncryptedKeyError(Exception):
    """OpenSSL asks for a passphrase."""


def _no_passphrase() -> str:
    # Without this callback, OpenSSL would ask for a passphrase at the terminal.
    raise _EncryptedKeyError
