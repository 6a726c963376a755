"""Writes the generated parts of the chart: its schema from the programs' settings, its README from its values.

.venv/bin/python tools/chart.py            write helm/values.schema.json and helm/README.md
.venv/bin/python tools/chart.py --check    exit 1 if they are not what this would write
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from kvrelay.common.settings import SettingInfo, describe
from kvrelay.decode_worker.settings import DecodeSettings
from kvrelay.gateway.settings import GatewaySettings
from kvrelay.prefill_worker.settings import PrefillSettings

CHART = Path(__file__).resolve().parent.parent / "helm"
Schema = dict[str, Any]

# Settings that the chart itself sets: where a pod listens, what it finds, which model it serves.
OF_THE_CHART = {
    "address", "admin_host", "admin_port", "api_keys", "data_address", "decode_workers", "device", "discovery", "host",
    "insecure", "keys", "leader_address", "model", "namespace", "node_name", "node_rank", "nodes", "port", "prefill_workers",
    "pipeline_parallel", "served_model_name", "tensor_parallel", "tls_cert", "tls_key", "worker_id", "worker_selector",
}  # fmt: skip

TEXT: Schema = {"type": "string"}
BOOL: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
OBJECTS: Schema = {"type": "array", "items": {"type": "object"}}
TEXTS: Schema = {"type": "array", "items": {"type": "string"}}
STRINGS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
NUMBER_OR_SHARE: Schema = {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9]+%$"}]}
QUANTITY: Schema = {"type": "string", "pattern": "^([0-9]+(\\.[0-9]+)?([kMGTPE]i?|m)?)?$"}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}


NODES = (
    "pods of each worker. HPA and KEDA count pods: groups of several are scaled by a LeaderWorkerSet (leaderWorkerSet), or by hand "
    "(replicas)"
)
GROUPS = (
    "workers of several pods are a LeaderWorkerSet, whose operator must be installed; HPA and KEDA then count workers"
)
SCALING = (
    "by an HPA or by KEDA, which count pods: with nodesPerWorker above 1 it is refused, as workers would be left in parts, unless "
    "leaderWorkerSet is true; scale such a pool by hand (replicas)"
)


def whole(minimum: int) -> Schema:
    """A whole number of at least ``minimum``."""
    return {"type": "integer", "minimum": minimum}


def choice(*values: str) -> Schema:
    """One of ``values``."""
    return {"type": "string", "enum": list(values)}


def closed(**properties: Schema) -> Schema:
    """An object with only these keys, so that a typing error is reported."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


def setting_schema(info: SettingInfo) -> Schema:
    """The schema of a setting's values."""
    kinds = {str: "string", int: "integer", float: "number", bool: "boolean"}
    one: Schema = {"type": kinds[info.kind], "description": info.help}
    if info.choices is not None:
        one["enum"] = list(info.choices)
    if info.minimum is not None:
        one["minimum"] = info.minimum
    if info.maximum is not None:
        one["maximum"] = info.maximum
    return {"type": "array", "items": one} if info.is_list else one


def settings_schema(settings: type) -> Schema:
    """The ``settings`` of one program."""
    return closed(**{info.name: setting_schema(info) for info in describe(settings) if info.name not in OF_THE_CHART})


def scaler(list_name: str, **more: Schema) -> Schema:
    """One of the two autoscalers."""
    return closed(enabled=BOOL, minReplicas=whole(0), maxReplicas=whole(1), **{list_name: OBJECTS}, **more)


def component(settings: type, **more: Schema) -> Schema:
    """The values that gateway, prefill and decode share, and ``more``."""
    return closed(
        replicas=whole(0),
        settings=settings_schema(settings),
        resources=closed(requests=OBJECT, limits=OBJECT, claims=OBJECTS),
        podDisruptionBudget=closed(enabled=BOOL, maxUnavailable=NUMBER_OR_SHARE),
        autoscaling=closed(hpa=scaler("metrics", behavior=OBJECT), keda=scaler("triggers", prometheus=TEXT)),
        monitor=closed(enabled=BOOL, interval={"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"}, labels=STRINGS),
        serviceAccount=closed(create=BOOL, name=TEXT, annotations=STRINGS),
        strategy=closed(
            type=choice("RollingUpdate", "Recreate"),
            rollingUpdate=closed(maxSurge=NUMBER_OR_SHARE, maxUnavailable=NUMBER_OR_SHARE),
        ),
        nodeSelector=STRINGS,
        tolerations=OBJECTS,
        affinity=OBJECT,
        topologySpreadConstraints=OBJECTS,
        priorityClassName=TEXT,
        runtimeClassName=TEXT,
        podLabels=STRINGS,
        podAnnotations=STRINGS,
        extraEnv=OBJECTS,
        extraEnvFrom=OBJECTS,
        extraVolumes=OBJECTS,
        extraVolumeMounts=OBJECTS,
        **more,
    )


def worker(settings: type) -> Schema:
    """A pool of workers."""
    ranks, stages, nodes = (
        next(info for info in describe(settings) if info.name == name)
        for name in ("tensor_parallel", "pipeline_parallel", "nodes")
    )
    pool = component(
        settings,
        tensorParallel=setting_schema(ranks),
        pipelineParallel=setting_schema(stages),
        nodesPerWorker={**setting_schema(nodes), "description": NODES},
        leaderWorkerSet={**BOOL, "description": GROUPS},
        gpu=closed(resource=TEXT),
        sharedMemory=QUANTITY,
        startupSeconds=whole(2),
    )
    pool["properties"]["autoscaling"]["description"] = SCALING
    return pool


def schema() -> Schema:
    """helm/values.schema.json."""
    digest = {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"}
    image = closed(repository={"type": "string", "minLength": 1}, digest=digest)
    route = closed(enabled=BOOL, parentRefs=OBJECTS, hostnames=TEXTS)
    values = closed(
        nameOverride=TEXT,
        fullnameOverride=TEXT,
        image=closed(
            registry=TEXT,
            tag=TEXT,
            pullPolicy=choice("IfNotPresent", "Always", "Never"),
            pullSecrets=OBJECTS,
            gateway=image,
            worker=image,
        ),
        model=closed(
            name={"type": "string", "minLength": 1},
            servedName=TEXT,
            source=choice("huggingface", "volume"),
            huggingFace=closed(
                tokenSecret=closed(name=TEXT, key=TEXT), cache=closed(existingClaim=TEXT, sizeLimit=QUANTITY)
            ),
            volume=closed(existingClaim=TEXT, hostPath={"type": "string", "pattern": "^(/.*)?$"}),
        ),
        adapters=closed(existingClaim=TEXT, hostPath={"type": "string", "pattern": "^(/.*)?$"}),
        models={
            "type": "object",
            "propertyNames": {"pattern": "^[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?$"},
            "additionalProperties": closed(
                model={"$ref": "#/properties/model"},
                adapters={"$ref": "#/properties/adapters"},
                prefill={"$ref": "#/properties/prefill"},
                decode={"$ref": "#/properties/decode"},
            ),
        },
        podSecurityContext=OBJECT,
        containerSecurityContext=OBJECT,
        security=closed(
            keys=closed(enabled=BOOL, existingSecret=TEXT), apiKeys=closed(enabled=BOOL, existingSecret=TEXT)
        ),
        sameHost=closed(hostPath={"type": "string", "pattern": "^(/.*)?$"}),
        metrics=closed(rules=closed(enabled=BOOL, labels=STRINGS), dashboard=closed(enabled=BOOL, labels=STRINGS)),
        networkPolicy=closed(
            enabled=BOOL,
            clients=OBJECTS,
            scrapers=OBJECTS,
            apiServerPorts={"type": "array", "items": PORT},
            extraEgress=OBJECTS,
        ),
        gateway=component(
            GatewaySettings,
            service=closed(
                type=choice("ClusterIP", "NodePort", "LoadBalancer"),
                port=PORT,
                annotations=STRINGS,
            ),
            tls=closed(secretName=TEXT),
            ingress=closed(enabled=BOOL, className=TEXT, annotations=STRINGS, hosts=TEXTS, tls=OBJECTS),
            httpRoute=route,
            preStopSeconds=whole(0),
        ),
        prefill=worker(PrefillSettings),
        decode=worker(DecodeSettings),
        extraObjects=OBJECTS,
    )
    values["properties"]["global"] = OBJECT  # values that a parent chart may set
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of kvrelay's chart", **values}


_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z]+):(?: (?P<value>.*))?$")


def documented(values: str) -> list[tuple[str, str, str]]:
    """(path, default, comment) of each line of values.yaml with a value. A comment belongs to the key below it."""
    rows: list[tuple[str, str, str]] = []
    path: list[str] = []
    comment: list[str] = []
    for line in values.splitlines():
        if line.lstrip().startswith("#"):
            comment.append(line.lstrip("# "))
            continue
        if (match := _KEY.match(line)) is None:
            comment = []
            continue
        depth = len(match["indent"]) // 2
        path = [*path[:depth], match["key"]]
        if match["value"] is not None:
            rows.append((".".join(path), match["value"], " ".join(comment)))
        comment = []
    return rows


def readme(values: str) -> str:
    """helm/README.md."""
    lines = [
        "# kvrelay's chart",
        "",
        "`helm install kvrelay ./helm` serves a model with a gateway, prefill workers and decode workers, each scaled on its own.",
        "[docs/kubernetes.md](../docs/kubernetes.md) walks through it; `examples/` has values for common cases.",
        "",
        "Values, with their defaults. `settings` takes every setting of the program by its name, see `kvrelay COMMAND --help-all`;",
        "a name that does not exist is refused. This file is written by `tools/chart.py`.",
        "",
        "| value | default | |",
        "| --- | --- | --- |",
    ]
    for path, default, comment in documented(values):
        shown = default.replace("|", "\\|")
        lines.append(f"| `{path}` | `{shown}` | {comment.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write or check the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if something has drifted")
    is_check = parser.parse_args().check
    written = {
        CHART / "values.schema.json": json.dumps(schema(), indent=2) + "\n",
        CHART / "README.md": readme((CHART / "values.yaml").read_text()),
    }
    drifted = [path for path, text in written.items() if not path.exists() or path.read_text() != text]
    for path in drifted:
        if is_check:
            sys.stderr.write(f"{path.relative_to(CHART.parent)} is not what tools/chart.py writes; run it\n")
        else:
            path.write_text(written[path])
    return 1 if is_check and drifted else 0


if __name__ == "__main__":
    sys.exit(main())
