"""The values in the chart's examples: the rendered objects, and their check by lint and by Kubernetes' schemas."""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
from pathlib import Path

import kubernetes_validate
import pytest

from .chart import CHART, MONITORING, helm, needs_helm, objects, rendered

GOLDEN = Path(__file__).parent / "golden"
EXAMPLES = sorted(CHART.glob("examples/*.yaml"))
STORED = ("defaults", "locked-down", "8-gpu-nodes", "several-models", "several-nodes")
VERSIONS = (
    "1.28",
    "1.37",
)  # the oldest and the newest version with schemas: few fields exist for only the ten between
CUSTOM = {
    "HTTPRoute",
    "InferencePool",
    "PodMonitor",
    "PrometheusRule",
    "ScaledObject",
}  # kinds of other projects, which have schemas of their own
_MADE = re.compile(r"^(  (?:gateway|prefill|decode)\.(?:key|pem)|  key|  api-keys): \S+$", re.MULTILINE)


@functools.cache
def problem_of(document: str, version: str) -> str | None:
    """The schema error of a document, or None. Cached, as examples share most of their objects."""
    try:
        kubernetes_validate.validate(json.loads(document), version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error)
    return None


def documents(text: str) -> list[tuple[str, str]]:
    """The documents of ``text``, each as (head, document). The head has its template and kind."""
    return [(part.partition("\nmetadata:")[0], part) for part in re.split(r"^---\n", text, flags=re.MULTILINE)]


def difference(text: str, other: str) -> str:
    """A diff of each document of ``text`` against the one with the same head in ``other``, without line numbers."""
    known, lines = dict(documents(other)), []
    for head, document in documents(text):
        if (beside := known.get(head, "")) != document:
            changes = difflib.unified_diff(beside.splitlines(), document.splitlines(), n=0, lineterm="")
            lines += [f"=== {head.splitlines()[0]}"]
            lines += ["@@" if line.startswith("@@") else line for line in list(changes)[2:]]
    lacking = known.keys() - dict(documents(text)).keys()
    return "\n".join([*lines, *(f"=== none of {head.splitlines()[0]}" for head in sorted(lacking))]) + "\n"


@needs_helm
@pytest.mark.parametrize("example", STORED)
def test_examples_render_as_they_did(example: str) -> None:
    """To accept a change, run KVRELAY_WRITE_GOLDEN=1 pytest tests/helm, and review the difference."""

    def text_of(name: str) -> str:
        arguments = ("--values", str(CHART / f"examples/{name}.yaml"), "--set", "metrics.dashboard.enabled=false")
        return _MADE.sub(r"\1: (made at the first install)", rendered(*arguments, *MONITORING))

    text = text_of(example)
    if example != "defaults":
        text = difference(text, text_of("defaults"))
    golden = GOLDEN / (f"{example}.yaml" if example == "defaults" else f"{example}.diff")
    if os.environ.get("KVRELAY_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@needs_helm
def test_the_chart_passes_lint() -> None:
    """The linted values turn on autoscaling; other tests render every example."""
    ended = helm("lint", "--strict", str(CHART), "--values", str(CHART / "examples/autoscaled.yaml"))
    assert ended.returncode == 0, ended.stdout + ended.stderr


@needs_helm
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_what_kubernetes_takes(example: Path) -> None:
    """The strict schemas of the oldest and the newest version, in which an unknown field is an error."""
    everything = (
        "--set",
        "gateway.ingress.enabled=true,gateway.httpRoute.enabled=true,gateway.httpRoute.parentRefs[0].name=g",
    )
    for (kind, name), document in objects("--values", str(example), *MONITORING, *everything).items():
        if kind in CUSTOM:
            continue
        for version in VERSIONS:
            problem = problem_of(json.dumps(document), version)
            assert problem is None, f"{kind} {name} against {version}: {problem}"


@needs_helm
def test_a_route_does_not_cut_long_answers_off() -> None:
    """Without time-outs of its own, a route gets the Gateway's, which may be 15 seconds."""
    found = objects("--set", "gateway.httpRoute.enabled=true,gateway.httpRoute.parentRefs[0].name=g")
    (rule,) = found["HTTPRoute", "relay-kvrelay-gateway"]["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s"}
    assert rule["backendRefs"] == [{"name": "relay-kvrelay-gateway", "port": 80}]
