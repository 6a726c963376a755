"""The commands that have settings: what ``--help`` says of each, its settings and its function. Data only; nothing is imported."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command. ``settings`` names its settings (a dataclass, or Options) and ``run`` its function, as ``module:attribute``."""

    summary: str
    details: str
    settings: str
    run: str  # called with the settings; returns the exit code
    common: tuple[str, ...] = ()  # settings in --help; (): all. --help-all shows all
    subcommands: tuple[str, ...] = ()  # click commands, as ``module:attribute``; without one of them ``run`` runs


_BENCH_DETAILS = """Sends requests and notes when every chunk of every answer came. Lengths are in tokens. Needs
'kvrelay[bench]'.

\b
Examples:
  kvrelay bench --self-serve --concurrency 4 --duration-s 20
      start the demo deployment, measure it, stop it
  kvrelay bench --url http://HOST:8000 --rate 2 --input-len 512 --output-len 128 --slo ttft=1s,itl=100ms
      2 requests a second at a server that runs, in random gaps; how many answers were good enough
  kvrelay bench --serve prefill=0,decode=2 --rate 1 --burst every=5s,n=4,input=1500,output=16 --output colocated.json
      a deployment without prefill workers; what long prompts do to the answers under way
  kvrelay bench --input-len lognormal:600,400 --prefix-tokens 512 --prefix-groups 8 --warmup 5s
      lengths as in real traffic, 8 shared beginnings, the first 5 seconds not counted
  kvrelay bench compare colocated.json disaggregated.json
      two runs side by side"""

_OF_WORKERS = (
    "model", "address", "admin_host", "admin_port", "device", "dtype", "weight_format", "kv_memory_mb", "kv_memory_fraction",
    "max_model_len", "max_num_seqs", "threads", "tensor_parallel", "adapters", "keys", "log_level",
)  # fmt: skip

COMMANDS: dict[str, CommandEntry] = {
    "local": CommandEntry(
        "Serve a model on this machine: gateway and workers, each in its own process.",
        "Ctrl-C stops everything in order. Options of gateways and workers are options here, and reach those that have them. "
        "Only names, addresses and nodes of workers, and how they are found, are chosen for you.",
        "kvrelay.launcher.settings:LOCAL",
        "kvrelay.launcher.local.deployment:run",
        (
            "model",
            "host",
            "port",
            "prefill",
            "decode",
            "device",
            "dtype",
            "weight_format",
            "kv_memory_mb",
            "max_model_len",
            "threads",
            "tensor_parallel",
            "adapters",
            "speculation",
            "api_keys",
            "quiet",
        ),
    ),
    "gateway": CommandEntry(
        "Run a gateway: the OpenAI-compatible HTTP API in front of the workers.",
        "Needs no torch (pip install 'kvrelay[gateway]').",
        "kvrelay.gateway.settings:GatewaySettings",
        "kvrelay.launcher.components:run_gateway",
        (
            "model",
            "host",
            "port",
            "discovery",
            "prefill_workers",
            "decode_workers",
            "policy",
            "local_prefill",
            "adapters",
            "keys",
            "api_keys",
            "tls_cert",
            "tls_key",
            "log_level",
        ),
    ),
    "prefill-worker": CommandEntry(
        "Run a prefill worker: it computes prompts and ships their KV blocks.",
        "",
        "kvrelay.prefill_worker.settings:PrefillSettings",
        "kvrelay.launcher.components:run_prefill_worker",
        (*_OF_WORKERS, "ttft_budget_ms"),
    ),
    "decode-worker": CommandEntry(
        "Run a decode worker: it receives KV blocks and generates.",
        "",
        "kvrelay.decode_worker.settings:DecodeSettings",
        "kvrelay.launcher.components:run_decode_worker",
        (*_OF_WORKERS, "data_address", "itl_budget_ms", "speculation"),
    ),
    "verify": CommandEntry(
        "Compare greedy tokens with transformers, prompt by prompt.",
        "Starts deployments here that prefill locally and that hand KV blocks over, or asks the one at "
        "--url. Every prompt runs alone and then among others. Exit code 1 if a single token differs.",
        "kvrelay.launcher.settings:VerifySettings",
        "kvrelay.launcher.verify.run:run",
    ),
    "bench": CommandEntry(
        "Measure latency and throughput of any OpenAI-compatible server.",
        _BENCH_DETAILS,
        "kvrelay.launcher.bench.settings:BenchSettings",
        "kvrelay.launcher.bench.run:run",
        subcommands=("kvrelay.launcher.bench.compare:compare",),
    ),
}
