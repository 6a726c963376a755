"""What clients may take, and whether they speak TLS."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import setting


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What clients may take before they are turned away."""

    max_header_bytes: int = setting(
        64 * 2**10, "largest request line and headers of one request; beyond it 431", unit="bytes", minimum=1024
    )
    header_timeout_s: float = setting(
        10.0, "how long the headers of a request may take to arrive", unit="s", minimum=0.1
    )
    client_timeout_s: float = setting(
        30.0,
        "how long the body of a request may take to arrive, and how long its client may read nothing of the answer",
        unit="s",
        minimum=0.1,
    )
    keep_alive_s: float = setting(
        75.0,
        "how long a connection stays open without a request; set it longer than clients and load balancers keep theirs, "
        "else a request may meet a connection that is being closed",
        unit="s",
        minimum=0.1,
    )
    max_connections: int = setting(10_000, "connections of clients at a time; one more gets 503", minimum=1)


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """Whether the HTTP API is HTTPS."""

    tls_cert: str | None = setting(
        None, "PEM file of the HTTP API's certificate and what it is signed by, read again when it changes"
    )
    tls_key: str | None = setting(None, "PEM file of the certificate's private key, without a passphrase")

    def __post_init__(self) -> None:
        """Raises SettingsError on one without the other."""
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("--tls-key", "--tls-cert") if self.tls_cert is None else ("--tls-cert", "--tls-key")
            raise SettingsError(f"{given} is set and {missing} is not: TLS needs both; set {missing}, too")
