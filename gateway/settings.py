"""All settings of a gateway. Each room gets only its own group."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from kvrelay.common.errors import SettingsError
from kvrelay.common.settings import closest, setting
from kvrelay.gateway.image_hosts import ImageHosts
from kvrelay.gateway.model_names import Alias, NamedModel, adapters_directory, is_address, is_label, worker_address
from kvrelay.wire.settings import KEYS_HELP, SERVED_MODEL_NAME_HELP

# The names of formats of calls and thoughts; kvrelay.gateway.chat implements them.
TOOL_PARSERS = (
    "auto", "none", "deepseek_v31", "deepseek_v32", "deepseek_v4", "glm47", "gpt_oss", "hermes", "kimi_k2", "lfm2", "llama3_json",
    "mistral", "mistral_args", "pythonic", "qwen3_coder",
)  # fmt: skip
REASONING_PARSERS = ("auto", "none", "deepseek_r1", "mistral", "qwen3", "seed_oss")

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\sA-Z/?#@]+")
_HTTP_URL = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?")


@dataclass(frozen=True, slots=True)
class DiscoverySettings:
    """How the gateway finds its workers."""

    discovery: str = setting(
        "static",
        "who the workers are: those of --prefill-workers and --decode-workers, or pods in Kubernetes",
        choices=("static", "kubernetes"),
    )
    prefill_workers: tuple[str, ...] = setting(
        (),
        "ZeroMQ addresses of prefill workers, such as tcp://10.0.0.7:7100; MODEL=tcp://… if there are several "
        "models. Without any, decode workers compute all prompts",
    )
    decode_workers: tuple[str, ...] = setting(
        ("tcp://127.0.0.1:7200",),
        "ZeroMQ addresses of decode workers, such as tcp://10.0.0.8:7200; MODEL=tcp://… if there are several models",
    )
    namespace: str | None = setting(None, "Kubernetes namespace of the workers' pods; default: the gateway's own")
    worker_selector: str = setting(
        "app.kubernetes.io/name=kvrelay",
        "labels of the workers' pods, which also have kvrelay.dev/role and, if there are several models, kvrelay.dev/model",
    )

    def __post_init__(self) -> None:
        """Raises SettingsError if an address is invalid, or if there is no decode worker."""
        if self.discovery == "kubernetes":
            return
        if not self.decode_workers:
            raise SettingsError("--decode-workers is empty: nobody could generate; name at least one, tcp://HOST:PORT")
        for name, addresses in (("prefill", self.prefill_workers), ("decode", self.decode_workers)):
            for address in addresses:
                if not is_address(address):
                    raise SettingsError(
                        f"--{name}-workers: {address!r} is no worker's address; write tcp://HOST:PORT (port 1 to 65535), "
                        "such as tcp://10.0.0.8:7200, or ipc://PATH"
                    )


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """How requests are routed and retried."""

    policy: str = setting(
        "prefix",
        "how workers are picked. prefix: the one with most of the prompt cached, unless it is clearly more loaded. least_loaded: "
        "the one with the least work",
        choices=("prefix", "least_loaded"),
    )
    prefix_map_blocks: int = setting(
        65536,
        "for --policy prefix: the gateway remembers which worker has which of so many KV blocks; some 150 bytes each",
        minimum=1,
    )
    local_prefill: str = setting(
        "sooner",
        "when decode workers compute prompts. sooner: if the first token comes sooner that way. fallback: while no "
        "prefill worker is up. never: requests get 503 then",
        choices=("sooner", "fallback", "never"),
    )
    max_attempts: int = setting(4, "attempts at one request before it fails; waiting for room is no attempt", minimum=1)
    request_timeout_s: float = setting(
        600.0, "how long one request may take in all; X-Request-Timeout asks for less", unit="s", minimum=1
    )
    room_timeout_s: float = setting(
        60.0, "how long a request may wait for a worker with room before it gets 503", unit="s", minimum=0
    )
    max_queued: int = setting(1024, "requests that may wait for a worker with room; one more gets 503", minimum=1)
    max_sequences: int = setting(
        128, "sequences that one request may ask for: prompts times n, best_of or beams; more get 400", minimum=1
    )
    prefill_backlog_s: float = setting(
        2.0,
        "work that may wait at a worker, in seconds of computing prompts; further prompts wait in the gateway",
        unit="s",
        minimum=0,
    )


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """The limits for clients."""

    max_header_bytes: int = setting(
        64 * 2**10, "largest request line and headers of one request; beyond it 431", unit="bytes", minimum=1024
    )
    header_timeout_s: float = setting(
        10.0, "how long the headers of a request may take to arrive", unit="s", minimum=0.1
    )
    client_timeout_s: float = setting(
        30.0,
        "how long a request's body may take to arrive, and how long a client may read nothing of its answer",
        unit="s",
        minimum=0.1,
    )
    keep_alive_s: float = setting(
        75.0,
        "how long a connection without a request stays open. Keep it above the idle time of clients and load "
        "balancers, or they see a 502 now and then",
        unit="s",
        minimum=0.1,
    )
    max_connections: int = setting(10_000, "connections of clients at a time; one more gets 503", minimum=1)


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """Whether the HTTP API is HTTPS."""

    tls_cert: str | None = setting(
        None, "PEM file of the HTTP API's certificate and its chain; read again when it changes"
    )
    tls_key: str | None = setting(None, "PEM file of the certificate's private key, without a passphrase")

    def __post_init__(self) -> None:
        """Raises SettingsError if only one of the two files is given."""
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("--tls-key", "--tls-cert") if self.tls_cert is None else ("--tls-cert", "--tls-key")
            raise SettingsError(f"{given} is set and {missing} is not: TLS needs both; set {missing}, too")


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Which requests are traced, and where traces are sent."""

    trace_endpoint: str | None = setting(
        None,
        "OpenTelemetry collector that gets traces by OTLP over HTTP, such as http://collector:4318; default: no traces",
    )
    trace_sample: float = setting(
        0.1,
        "share of requests that are traced; a request with a traceparent follows that instead",
        minimum=0,
        maximum=1,
    )

    def __post_init__(self) -> None:
        """Raises SettingsError if the endpoint is no URL."""
        if self.trace_endpoint is not None and _HTTP_URL.fullmatch(self.trace_endpoint) is None:
            raise SettingsError(
                f"--trace-endpoint: {self.trace_endpoint!r} is no URL of a collector; write http://HOST:PORT or "
                "https://HOST:PORT, such as http://collector:4318; /v1/traces is added"
            )


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """The gateway's settings."""

    relay: RelaySettings
    workers: DiscoverySettings
    http: HttpLimits = field(default_factory=HttpLimits)
    tls: TlsSettings = field(default_factory=TlsSettings)
    traces: TraceSettings = field(default_factory=TraceSettings)
    model: tuple[str, ...] = setting(
        ("demo",),
        "model directory, GGUF file, Hugging Face id, or 'demo'. May be given several times, also as NAME=MODEL: "
        "each model has workers of its own",
    )
    served_model_name: str | None = setting(None, SERVED_MODEL_NAME_HELP)
    alias: tuple[str, ...] = setting(
        (),
        "one more name for a model: ALIAS=MODEL. ALIAS=MODEL:WEIGHT+MODEL:WEIGHT divides conversations among several",
    )
    default_model: str | None = setting(
        None, "model or alias for requests that name none. Default: the first of --model"
    )
    adapters: tuple[str, ...] = setting(
        (),
        "directory of LoRA adapters as PEFT saves them, each in a folder by its name; MODEL=DIRECTORY if there are "
        "several models. The same as the workers'",
    )
    tool_parser: str = setting(
        "auto",
        "format in which the model writes tool calls. auto: what its chat template shows",
        choices=TOOL_PARSERS,
    )
    reasoning_parser: str = setting(
        "auto",
        "how the model marks its reasoning. auto: what its chat template shows",
        choices=REASONING_PARSERS,
    )
    host: str = setting("127.0.0.1", "address that the HTTP API listens on; ::, all of them, IPv6 and IPv4")
    port: int = setting(8000, "port of the HTTP API", minimum=0, maximum=65535)
    keys: str | None = setting(None, KEYS_HELP)
    api_keys: str | None = setting(
        None, "file of API keys, one line 'NAME SHA256' each (made by kvrelay api-key). Without it everybody may ask"
    )
    allowed_origins: tuple[str, ...] = setting(
        (), "origins of web pages whose scripts may ask (CORS), such as https://chat.example.com, or *"
    )
    max_body_bytes: int = setting(4 * 2**20, "largest request body without its images", unit="bytes", minimum=1024)
    max_image_bytes: int = setting(
        32 * 2**20, "room for images in a body beside that, in base64", unit="bytes", minimum=0, maximum=64 * 2**20
    )
    image_hosts: tuple[str, ...] = setting(
        (),
        "hosts from which images are fetched that requests name by URL: images.example.com, *.example.com for all hosts below, "
        "HOST:PORT, or http://HOST without TLS. Without any, nothing is fetched",
    )
    drain_s: float = setting(30.0, "how long running requests may finish after SIGTERM", unit="s", minimum=0)
    log_level: str = setting("info", "how much is logged", choices=("debug", "info", "warning", "error"))
    access_log: bool = setting(
        False,
        "log a line for each request: key, model, tokens, times; never its text",
    )
    log_format: str = setting("text", "shape of log lines", choices=("text", "json"))

    def __post_init__(self) -> None:
        """Raises SettingsError on an origin that no browser sends, on what is no host, and on models with equal names."""
        for origin in self.allowed_origins:
            if origin != "*" and _ORIGIN.fullmatch(origin) is None:
                raise SettingsError(
                    f"--allowed-origins: {origin!r} is no origin; write https://HOST or https://HOST:PORT, in lower case and "
                    "without a path, or *"
                )
        ImageHosts(self.image_hosts)
        if not self.model:
            raise SettingsError("--model is empty: nothing could be served; name a model, such as demo")
        if self.served_model_name is not None and len(self.model) > 1:
            raise SettingsError(
                f"--served-model-name is {self.served_model_name!r}, but there are {len(self.model)} models; write "
                "--model NAME=MODEL for each"
            )

    def named_models(self) -> list[NamedModel]:
        """The models. ``served_model_name``, if set, names the only one."""
        models = [NamedModel.of(text) for text in self.model]
        return models if self.served_model_name is None else [NamedModel(self.served_model_name, models[0].path)]

    def aliases_of(self, names: Collection[str]) -> list[Alias]:
        """The aliases, given the models' ``names``. Raises SettingsError if an alias names an unknown model."""
        if len(names) < len(self.model):
            raise SettingsError(f"--model: two models have one name among {', '.join(names)}; write NAME=MODEL")
        aliases = [Alias.of(text, names) for text in self.alias]
        known = [*names, *(alias.name for alias in aliases)]
        if twice := [name for name in known if known.count(name) > 1]:
            raise SettingsError(f"--alias: {twice[0]!r} is there twice; leave one out")
        if self.default_model is not None and self.default_model not in known:
            raise SettingsError(
                f"--default-model: {self.default_model!r} is not served; {closest(self.default_model, known)}"
            )
        return aliases

    def adapters_of(self, names: Collection[str]) -> dict[str, str]:
        """The directories of adapters by model, given the models' ``names``. Raises SettingsError."""
        directories: dict[str, str] = {}
        for text in self.adapters:
            name, directory = adapters_directory(text)
            if not name and len(names) > 1:
                raise SettingsError(
                    f"--adapters: {text!r} has no model, and there are {len(names)}; write MODEL={text}"
                )
            model = name or next(iter(names))
            if model not in names:
                raise SettingsError(f"--adapters: {model!r} of {text!r} is not served; {closest(model, names)}")
            if model in directories:
                raise SettingsError(f"--adapters: {model!r} has two directories; leave one out")
            directories[model] = directory
        return directories

    def check_workers(self, names: Collection[str]) -> None:
        """Raises SettingsError if a worker cannot be assigned to one of the models."""
        if self.workers.discovery == "kubernetes":
            if len(names) > 1 and (wrong := [name for name in names if not is_label(name)]):
                raise SettingsError(
                    f"--model: {wrong[0]!r} cannot be the value of the label kvrelay.dev/model; write NAME={wrong[0]}, with at "
                    "most 63 letters, digits, '-', '_' and '.'"
                )
            return
        for text in (*self.workers.prefill_workers, *self.workers.decode_workers):
            model, address = worker_address(text)
            if not model and len(names) > 1:
                raise SettingsError(f"{address} has no model, and there are {len(names)}; write MODEL={address}")
            if model and model not in names:
                raise SettingsError(f"{text}: {model!r} is not served; {closest(model, names)}")
