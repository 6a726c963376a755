"""Everything a gateway is started with; rooms keep the settings that are theirs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import setting
from kvrelay.gateway.chat.dialect import REASONING_PARSERS, TOOL_PARSERS
from kvrelay.gateway.http.settings import HttpLimits, TlsSettings
from kvrelay.gateway.relay.settings import RelaySettings
from kvrelay.gateway.workers.settings import DiscoverySettings
from kvrelay.wire.settings import KEYS_HELP

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\sA-Z/?#@]+")


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """The gateway's settings."""

    relay: RelaySettings
    workers: DiscoverySettings
    http: HttpLimits = field(default_factory=HttpLimits)
    tls: TlsSettings = field(default_factory=TlsSettings)
    model: str = setting("demo", "model directory, GGUF file, Hugging Face id, or 'demo'; only its tokenizer is loaded")
    served_model_name: str | None = setting(None, "model name in the API; default: the model directory's name")
    tool_parser: str = setting(
        "auto",
        "how the model writes calls of functions: a family of models, what its chat template shows, or not at all",
        choices=TOOL_PARSERS,
    )
    reasoning_parser: str = setting(
        "auto",
        "how the model marks its thoughts: a family of models, what its chat template shows, or not at all",
        choices=REASONING_PARSERS,
    )
    host: str = setting("127.0.0.1", "address that the HTTP API listens on")
    port: int = setting(8000, "port of the HTTP API", minimum=0, maximum=65535)
    keys: str | None = setting(None, KEYS_HELP)
    api_keys: str | None = setting(
        None, "file of API keys, a line 'NAME SHA256' each (kvrelay api-key); without, everybody may ask"
    )
    allowed_origins: tuple[str, ...] = setting(
        (), "origins of web pages whose scripts may ask (CORS), such as https://chat.example.com, or *; default: none"
    )
    max_body_bytes: int = setting(4 * 2**20, "largest request body", unit="bytes", minimum=1024)
    drain_s: float = setting(30.0, "how long running requests may finish after SIGTERM", unit="s", minimum=0)
    log_level: str = setting("info", "how much is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = setting("text", "shape of log lines", choices=("text", "json"))

    def __post_init__(self) -> None:
        """Raises SettingsError on an origin that no browser sends."""
        for origin in self.allowed_origins:
            if origin != "*" and _ORIGIN.fullmatch(origin) is None:
                raise SettingsError(
                    f"--allowed-origins: {origin!r} is no origin; write https://HOST or https://HOST:PORT, in lower case and "
                    "without a path, or *"
                )
