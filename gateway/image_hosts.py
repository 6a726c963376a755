"""Addresses of images on the web, and the hosts from which an operator lets the gateway fetch them.

An address is taken apart once, by a strict pattern, and the request is built from its checked parts. So no other parser can find
another host in it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urljoin

from kvrelay.common.errors import SettingsError
from kvrelay.common.listening import host_port

_MAX_CHARS = 8192  # of an address
_PORTS = {"http": 80, "https": 443}
_ADDRESS = re.compile(
    r"(?P<scheme>https?)://(?P<user>[^/?#]*@)?(?P<host>\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:(?P<port>[0-9]{1,5}))?"
    r"(?P<path>/[^?#]*)?(?P<query>\?[^#]*)?(#.*)?",
    re.IGNORECASE,
)
_PLAIN = re.compile(r"[!-~]*")
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")  # as the last label: some resolvers read the whole name as an IPv4 address
_ENTRY = re.compile(r"((?P<scheme>https?)://)?(?P<wild>\*\.)?(?P<rest>[^/?#@*]+)")


@dataclass(frozen=True, slots=True)
class WebAddress:
    """Where a file is on the web."""

    scheme: str
    host: str  # in lower case, without a trailing dot; an IPv6 address without brackets
    port: int
    path: str = field(repr=False)  # with its query, which may be a signature: no log, error or trace shows it

    @classmethod
    def of(cls, url: str) -> WebAddress:
        """The parts of ``url``. Raises ValueError with a reason, which quotes nothing of it."""
        if len(url) > _MAX_CHARS:
            raise ValueError(f"it has {len(url)} characters, and may have {_MAX_CHARS}")
        if _PLAIN.fullmatch(url) is None:
            raise ValueError("it has spaces or characters beyond ASCII; write its host as xn--… and the rest with %")
        found = _ADDRESS.fullmatch(url)
        if found is None:
            raise ValueError("it is not https://HOST/PATH")
        if found["user"] is not None:
            raise ValueError("it has a user or a password; leave them out")
        scheme = found["scheme"].lower()
        port = int(found["port"] or _PORTS[scheme])
        if not 0 < port < 2**16:
            raise ValueError("its port is not 1 to 65535")
        return cls(scheme, _host(found["host"].lower()), port, (found["path"] or "/") + (found["query"] or ""))

    @property
    def site(self) -> str:
        """The address without its path, for people."""
        name = host_port(self.host, self.port)
        return f"{self.scheme}://{name if self.port != _PORTS[self.scheme] else name.removesuffix(f':{self.port}')}"

    @property
    def url(self) -> str:
        """The whole address, as it is asked for. It may contain a signature."""
        return self.site + self.path

    def redirected(self, location: str) -> WebAddress:
        """Where ``location`` leads from here. Raises ValueError with a reason."""
        try:
            url = urljoin(self.url, location)
        except ValueError:
            raise ValueError("it is not https://HOST/PATH") from None
        return WebAddress.of(url)


class ImageHosts:
    """The hosts of ``--image-hosts``."""

    def __init__(self, entries: Sequence[str]) -> None:
        """``entries``: HOST, or \\*.DOMAIN for all hosts below a domain; before it http://, and a port behind it, if it has others
        than those of https. Raises SettingsError.
        """
        self._hosts: set[tuple[str, str, int]] = set()
        self._domains: set[tuple[str, str, int]] = set()
        for entry in entries:
            found = _ENTRY.fullmatch(entry)
            try:
                if found is None:
                    raise ValueError("it has more than a host and a port")
                address = WebAddress.of(f"{found['scheme'] or 'https'}://{found['rest']}")
                if found["wild"] and (_is_numeric(address.host) or "." not in address.host):
                    raise ValueError("*. must be followed by a domain of two names or more")
            except ValueError as error:
                raise SettingsError(
                    f"--image-hosts: {entry!r} is no host of images ({error}); write images.example.com, *.example.com for all "
                    "hosts below it, or http://HOST:PORT"
                ) from error
            known = self._domains if found["wild"] else self._hosts
            known.add((address.scheme, address.host, address.port))

    def __bool__(self) -> bool:
        return bool(self._hosts or self._domains)

    def allows(self, address: WebAddress) -> bool:
        """Whether an image may be fetched from there."""
        if (address.scheme, address.host, address.port) in self._hosts:
            return True
        labels = address.host.split(".")
        above = (".".join(labels[first:]) for first in range(1, len(labels)))
        return any((address.scheme, domain, address.port) in self._domains for domain in above)


def _host(text: str) -> str:
    """A host in the one form in which hosts are compared. Raises ValueError."""
    name = text.strip("[]").removesuffix(".")
    is_name = not text.startswith("[") and _NUMBER.fullmatch(name.rpartition(".")[2]) is None
    if is_name and len(name) <= 253 and all(map(_LABEL.fullmatch, name.split("."))):
        return name
    try:
        return str(ipaddress.IPv6Address(name) if text.startswith("[") else ipaddress.IPv4Address(name))
    except ValueError:
        raise ValueError("its host is neither a name nor an IP address") from None


def _is_numeric(host: str) -> bool:
    return ":" in host or _NUMBER.fullmatch(host.rpartition(".")[2]) is not None
