"""Who the workers are."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import setting

_ADDRESS = re.compile(r"tcp://(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})|(ipc|inproc)://\S+")


@dataclass(frozen=True, slots=True)
class DiscoverySettings:
    """Who the workers are."""

    discovery: str = setting(
        "static",
        "who the workers are: those of --prefill-workers and --decode-workers, or pods in Kubernetes",
        choices=("static", "kubernetes"),
    )
    prefill_workers: tuple[str, ...] = setting(
        (), "ZeroMQ addresses of prefill workers, such as tcp://10.0.0.7:7100; without any, all prefill is local"
    )
    decode_workers: tuple[str, ...] = setting(
        ("tcp://127.0.0.1:7200",), "ZeroMQ addresses of decode workers, such as tcp://10.0.0.8:7200"
    )
    namespace: str | None = setting(None, "Kubernetes namespace of the workers' pods; default: the gateway's own")
    worker_selector: str = setting(
        "app.kubernetes.io/name=kvrelay", "labels of the workers' pods, which also have kvrelay.dev/role"
    )

    def __post_init__(self) -> None:
        """Raises SettingsError on an address that no worker can have, and without any decode worker."""
        if self.discovery == "kubernetes":
            return
        if not self.decode_workers:
            raise SettingsError("--decode-workers is empty: nobody could generate; name at least one, tcp://HOST:PORT")
        for name, addresses in (("prefill", self.prefill_workers), ("decode", self.decode_workers)):
            for address in addresses:
                match = _ADDRESS.fullmatch(address)
                if match is None or (match["port"] is not None and not 1 <= int(match["port"]) <= 65535):
                    raise SettingsError(
                        f"--{name}-workers: {address!r} is no worker's address; write tcp://HOST:PORT (port 1 to 65535), "
                        "such as tcp://10.0.0.8:7200, or ipc://PATH"
                    )
