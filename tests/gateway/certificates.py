"""Self-signed certificates for localhost."""

from __future__ import annotations

import datetime
import os
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_PEM = serialization.Encoding.PEM
_NOW = datetime.datetime.now(datetime.UTC)


def write_pair(directory: Path, name: str, passphrase: bytes | None = None) -> tuple[Path, Path]:
    """Write a certificate for localhost with subject ``name``, and its key. Returns both paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOW - datetime.timedelta(days=1))
        .not_valid_after(_NOW + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    encryption = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    paths = (directory / f"{name}.crt", directory / f"{name}.key")
    texts = (
        certificate.public_bytes(_PEM),
        key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, encryption),
    )
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text)
    return paths


def replace(old: tuple[Path, Path], new: tuple[Path, Path]) -> None:
    """Replace the files of a pair, each atomically, as cert-manager does."""
    for to, of in zip(old, new, strict=True):
        os.replace(of, to)


def trusting(cert: Path) -> ssl.SSLContext:
    """A client's context that accepts only this certificate."""
    return ssl.create_default_context(cafile=str(cert))
