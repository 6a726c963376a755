"""Writes the generated pages (settings, metrics), and checks that every name of a released version still exists.

.venv/bin/python tools/pages.py                   write docs/settings.md and docs/metrics.md
.venv/bin/python tools/pages.py --check           exit 1 if they are not what this would write
.venv/bin/python tools/pages.py --record 0.2.0    record this tree's names as those of a version

Each of them exits 1 if a setting, chart value, metric, route or field of ``tests/launcher/recorded`` has vanished. A recording
changes only when a name is removed as docs/compatibility.md allows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml  # type: ignore[import-untyped]
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.common.settings import SettingInfo, describe
from kvrelay.decode_worker.settings import DecodeSettings
from kvrelay.gateway.settings import GatewaySettings
from kvrelay.launcher.local.deployment import LocalDeployment
from kvrelay.launcher.models import resolve_model
from kvrelay.launcher.settings import CHOSEN, DeploymentSettings, LocalSettings
from kvrelay.prefill_worker.settings import PrefillSettings

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
RECORDED = ROOT / "tests" / "launcher" / "recorded"
Told = dict[str, dict[str, Metric]]

_WORKERS = "kvrelay prefill-worker and kvrelay decode-worker"
_SETTINGS_HEAD = """# Settings

Every setting has one name. `max_num_seqs` is the flag `--max-num-seqs`, the variable `KVRELAY_MAX_NUM_SEQS`, the key
`max_num_seqs` in the TOML file that `--config` names, and `decode.settings.max_num_seqs` in the [chart](../helm/README.md).
A flag wins over a variable, a variable over the file. A name that does not exist is an error, wherever it stands.

`tools/pages.py` writes this page from the code.
"""
_METRICS_HEAD = """# Metrics

Gateway and workers serve them for Prometheus at `/metrics`: a gateway at its API's port, a worker at `--admin-port`. The
[chart](../helm/README.md) brings a dashboard and alerts. Times are in seconds. `tools/pages.py` writes this page from what a
deployment tells.
"""


def settings_page() -> str:
    """docs/settings.md. Settings that both workers have appear once."""
    prefill, decode, gateway = (by_name(one) for one in (PrefillSettings, DecodeSettings, GatewaySettings))
    both = {name: info for name, info in decode.items() if prefill.get(name) == info}
    parts = {
        "kvrelay gateway": gateway,
        _WORKERS: both,
        "kvrelay prefill-worker": {name: info for name, info in prefill.items() if name not in both},
        "kvrelay decode-worker": {name: info for name, info in decode.items() if name not in both},
        "kvrelay local": by_name(DeploymentSettings),
    }
    chosen = sorted(info.flag for name, info in (gateway | prefill | decode).items() if name in CHOSEN)
    lines = [_SETTINGS_HEAD.rstrip(), "", "`kvrelay local` takes all settings below, but chooses these itself:"]
    lines += [", ".join(f"`{flag}`" for flag in chosen) + "."]
    for title, infos in parts.items():
        lines += ["", f"## {title}", "", "| setting | default | |", "| --- | --- | --- |"]
        lines += [f"| `{info.flag}` | {default_of(info)} | {cell(limits_of(info))} |" for info in infos.values()]
    return "\n".join(lines) + "\n"


def by_name(settings: type) -> dict[str, SettingInfo]:
    """The settings of one program."""
    return {info.name: info for info in describe(settings)}


def default_of(info: SettingInfo) -> str:
    """The default in a table."""
    if info.default is None or info.default == ():
        return ""
    if isinstance(info.default, tuple):
        return ", ".join(info.default)
    if isinstance(info.default, bool):
        return "on" if info.default else "off"
    return f"{info.default:g}" if isinstance(info.default, float) else str(info.default)


def limits_of(info: SettingInfo) -> str:
    """The purpose of a setting, and its limits."""
    limits = []
    if info.choices is not None:
        limits.append("one of " + ", ".join(f"`{choice}`" for choice in info.choices))
    if info.unit is not None:
        limits.append(f"in {info.unit}")
    if info.minimum is not None:
        limits.append(f"at least {info.minimum:.12g}")
    if info.maximum is not None:
        limits.append(f"at most {info.maximum:.12g}")
    return info.help + (f" ({'; '.join(limits)})" if limits else "")


def cell(text: str) -> str:
    """``text`` escaped for a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def told_by_deployment() -> tuple[Told, dict[str, Any]]:
    """The metrics of each component and the API's OpenAPI document. Starts a local deployment for some seconds."""
    settings = LocalSettings.of(port=0, engine="fake", kv_memory_mb=16, speculation="ngram")
    with LocalDeployment.from_settings(settings, resolve_model("demo", needs_weights=False)) as deployment:
        deployment.wait_ready(timeout_s=120)
        told = {name: families(url) for name, url in deployment.admin_urls.items()}
        document = httpx.get(f"{deployment.admin_urls['gateway']}/openapi.json", timeout=60).raise_for_status().json()
    return told, document


def metrics_page(told: Told) -> str:
    """docs/metrics.md."""
    gateway, prefill, decode = told["gateway"], told["prefill-0"], told["decode-0"]
    of_both = alike(prefill, decode)
    of_all = alike(gateway, decode) & of_both
    of_workers = of_both - of_all
    parts = {
        "Of gateways": without(gateway, of_all),
        "Of workers": {name: decode[name] for name in of_workers},
        "Of prefill workers": without(prefill, of_all | of_workers),
        "Of decode workers": without(decode, of_all | of_workers),
        "Of all": {name: decode[name] for name in of_all},
    }
    lines = [_METRICS_HEAD.rstrip()]
    for title, part in parts.items():
        lines += ["", f"## {title}", "", "| metric | kind | |", "| --- | --- | --- |"]
        lines += [f"| `{name}` | {one.type} | {cell(one.documentation)} |" for name, one in sorted(part.items())]
    return "\n".join(lines) + "\n"


def names_of(told: Told, document: dict[str, Any]) -> dict[str, Any]:
    """The names that a version promises to keep."""
    programs = {
        "gateway": GatewaySettings,
        "prefill-worker": PrefillSettings,
        "decode-worker": DecodeSettings,
        "local": DeploymentSettings,
    }
    metrics = {name: one.type for component in told.values() for name, one in component.items()}
    return {
        "settings": {program: sorted(by_name(settings)) for program, settings in programs.items()},
        "values": sorted(value_paths(yaml.safe_load((ROOT / "helm" / "values.yaml").read_text()))),
        "metrics": dict(sorted(metrics.items())),
        "api": {
            f"{method.upper()} {path}": fields_of(route, document)
            for path, methods in sorted(document["paths"].items())
            for method, route in methods.items()
        },
    }


def vanished(then: Any, now: Any, above: str = "") -> list[str]:
    """Names of ``then`` that ``now`` lacks, or that have another value there."""
    if isinstance(then, dict):
        pairs = [(name, value, f"{above}{name}: ") for name, value in then.items()]
        return [
            name for key, value, path in pairs for name in (vanished(value, now[key], path) if key in now else [path])
        ]
    if isinstance(then, list):
        return [f"{above}{name}" for name in then if name not in now]
    return [] if then == now else [f"{above}{then}, now {now}"]


def value_paths(values: dict[str, Any], above: str = "") -> Iterator[str]:
    """The paths of the chart's values."""
    for name, value in values.items():
        yield f"{above}{name}"
        if isinstance(value, dict):
            yield from value_paths(value, f"{above}{name}.")


def fields_of(route: dict[str, Any], document: dict[str, Any]) -> dict[str, list[str]]:
    """The paths of all fields in a route's requests and answers."""
    answers = [body for status, body in route["responses"].items() if status.startswith("2")]
    bodies = {"takes": [route.get("requestBody", {})], "answers": answers}
    return {
        name: sorted(
            {
                path
                for body in some
                for content in body.get("content", {}).values()
                for path in schema_paths(content.get("schema", {}), document, "")
            }
        )
        for name, some in bodies.items()
    }


def schema_paths(schema: Any, document: dict[str, Any], above: str, seen: tuple[str, ...] = ()) -> Iterator[str]:
    """The paths of all fields in a schema. ``seen``: references that contain it, which end recursion."""
    if isinstance(schema, list):
        for one in schema:
            yield from schema_paths(one, document, above, seen)
    elif isinstance(schema, dict):
        if (reference := schema.get("$ref", "")) and reference not in seen:
            named = document["components"]["schemas"][reference.rsplit("/", 1)[1]]
            yield from schema_paths(named, document, above, (*seen, reference))
        for name, inner in schema.get("properties", {}).items():
            yield f"{above}{name}"
            yield from schema_paths(inner, document, f"{above}{name}.", seen)
        for key in ("anyOf", "oneOf", "allOf", "items"):
            yield from schema_paths(schema.get(key), document, above, seen)


def families(url: str) -> dict[str, Metric]:
    """kvrelay's metrics at ``url``, by the names that queries use."""
    text = httpx.get(f"{url}/metrics", timeout=60).raise_for_status().text
    found: Iterable[Metric] = text_string_to_metric_families(text)
    named = {f"{one.name}_total" if one.type == "counter" else one.name: one for one in found}
    return {
        name: one
        for name, one in named.items()
        if not name.startswith(("python_", "process_")) and "_created" not in name
    }


def alike(first: dict[str, Metric], second: dict[str, Metric]) -> set[str]:
    """The names that both have with the same meaning."""
    return {name for name in first.keys() & second.keys() if first[name].documentation == second[name].documentation}


def without(told: dict[str, Metric], names: set[str]) -> dict[str, Metric]:
    """The metrics whose names are not in ``names``."""
    return {name: one for name, one in told.items() if name not in names}


def main() -> int:
    """Write or check the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if something has drifted")
    parser.add_argument("--record", metavar="VERSION", help="record this tree's names as those of a version")
    given = parser.parse_args()
    is_check = given.check
    told, document = told_by_deployment()
    names = names_of(told, document)
    written = {DOCS / "settings.md": settings_page(), DOCS / "metrics.md": metrics_page(told)}
    if given.record is not None:
        written[RECORDED / f"{given.record}.json"] = json.dumps(names, indent=1) + "\n"
    drifted = [path for path, text in written.items() if not path.exists() or path.read_text() != text]
    for path in drifted:
        if is_check:
            sys.stderr.write(f"{path.relative_to(ROOT)} is not what tools/pages.py writes; run it\n")
        else:
            path.write_text(written[path])
    lost = [
        f"{path.stem}: {name}"
        for path in sorted(RECORDED.glob("*.json"))
        for name in vanished(json.loads(path.read_text()), names)
    ]
    for one in lost:
        sys.stderr.write(f"{one} has vanished, which docs/compatibility.md does not allow\n")
    return 1 if lost or (is_check and drifted) else 0


if __name__ == "__main__":
    sys.exit(main())
