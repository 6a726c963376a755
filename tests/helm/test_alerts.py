"""Every alert fires at its time and not before, by promtool's unit tests of rules.

:mod:`tests.e2e.test_monitoring` shows on a real deployment that the series exist with these labels.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from .alerts import alerts, groups
from .chart import NAMESPACE, needs_helm

pytestmark = [needs_helm, pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool")]

GATEWAY, DECODE = "relay-kvrelay-gateway-0", "relay-kvrelay-decode-worker-0"
OK = 'kvrelay_requests_total{route="/v1/completions", outcome="200", pod="relay-kvrelay-gateway-0"}'


@dataclass(frozen=True)
class Case:
    """Series in promtool's notation, one sample a minute. The alert is silent at minute ``silent_at`` and fires at
    ``fires_at``."""

    alert: str
    series: dict[str, str]
    silent_at: int
    fires_at: int
    labels: dict[str, str]


CASES = [
    Case(
        "KvrelayNoWorker",
        {
            f'kvrelay_workers_up{{model="tiny", role="decode", pod="{GATEWAY}"}}': "1x4 0x20",
            f'kvrelay_workers_up{{model="tiny", role="prefill", pod="{GATEWAY}"}}': "1x24",
        },
        5, 7, {"model": "tiny", "role": "decode"},
    ),
    Case(
        "KvrelayRequestsFail",
        {
            OK: "0+60x40",
            OK.replace("200", "502"): "0x10 0+2x30",
            # A gateway that is not ready answers its probes with 503.
            OK.replace("200", "503").replace("/v1/completions", "/health/ready"): "0+12x40",
        },
        10, 25, {},
    ),
    Case(
        "KvrelayBlocksRefused",
        {
            f'kvrelay_refused_kv_blocks_total{{cause="bad_checksum", pod="{DECODE}"}}': "0+0.5x15 8+5x20",
            # Blocks come late whenever clients disconnect.
            f'kvrelay_refused_kv_blocks_total{{cause="unknown_lease", pod="{DECODE}"}}': "0+60x40",
        },
        15, 20, {"cause": "bad_checksum", "pod": DECODE},
    ),
    Case(
        "KvrelayComputesWrongly",
        {f'kvrelay_distrusted_workers_total{{model="tiny", role="prefill", pod="{GATEWAY}"}}': "0x15 1x25"},
        15, 17, {"role": "prefill"},
    ),
    Case("KvrelayStrangers", {f'kvrelay_refused_keys_total{{pod="{DECODE}"}}': "0+0.5x15 8+5x20"}, 15, 20, {"pod": DECODE}),
    Case("KvrelayWorkersRefused", {f'kvrelay_workers_refused{{pod="{GATEWAY}"}}': "0x5 1x30"}, 14, 17, {}),
    Case(
        "KvrelayRequestsWait",
        {
            f'kvrelay_ttft_part_seconds_bucket{{part="accept", le="5.0", pod="{GATEWAY}"}}': "0+10x15 150+8x25",
            f'kvrelay_ttft_part_seconds_bucket{{part="accept", le="10.0", pod="{GATEWAY}"}}': "0+10x40",
            f'kvrelay_ttft_part_seconds_bucket{{part="accept", le="+Inf", pod="{GATEWAY}"}}': "0+10x40",
        },
        15, 27, {},
    ),
    Case(
        "KvrelayRequestsRefused",
        {
            OK: "0+60x40",
            f'kvrelay_refused_requests_total{{reason="would_wait", pod="{GATEWAY}"}}': "0x10 0+6x30",
            OK.replace("200", "503"): "0x10 0+6x30",
        },
        10, 25, {},
    ),
    Case(
        "KvrelayDecodeFull",
        {
            f'kvrelay_kv_cache_usage_perc{{pod="{DECODE}"}}': "0.99x40",
            f'kvrelay_kv_cache_usage_perc{{pod="{DECODE[:-1]}1"}}': "0.5x10 0.97x30",
            'kvrelay_kv_cache_usage_perc{pod="relay-kvrelay-prefill-worker-0"}': "0x40",
        },
        14, 17, {},
    ),
]  # fmt: skip


def test_every_alert_has_a_case() -> None:
    assert [case.alert for case in CASES] == list(alerts())


def test_alerts_fire_in_time(tmp_path: Path) -> None:
    rules = alerts()

    def fired(case: Case) -> dict[str, object]:
        rule = rules[case.alert]
        summary = re.sub(
            r"\{\{ \$labels\.(\w+) \}\}", lambda name: case.labels[name[1]], rule["annotations"]["summary"]
        )
        return {"exp_labels": case.labels | rule["labels"], "exp_annotations": {"summary": summary}}

    tests = [
        {
            "interval": "1m",
            "input_series": [
                {"series": name.replace("{", f'{{namespace="{NAMESPACE}", '), "values": values}
                for name, values in case.series.items()
            ],
            "alert_rule_test": [
                {"alertname": case.alert, "eval_time": f"{case.silent_at}m", "exp_alerts": []},
                {"alertname": case.alert, "eval_time": f"{case.fires_at}m", "exp_alerts": [fired(case)]},
            ],
        }
        for case in CASES
    ]
    _run_promtool(tmp_path, groups(), tests)


@pytest.mark.parametrize(
    ("values", "up", "missing"),
    [
        ("prefill.replicas=0", {("tiny", "prefill"): 0, ("tiny", "decode"): 1}, []),
        ("prefill.replicas=0", {("tiny", "prefill"): 0, ("tiny", "decode"): 0}, [("tiny", "decode")]),
        (
            "models.a.model.name=x/a,models.b.model.name=x/b,models.a.prefill.replicas=0",
            {("a", "prefill"): 0, ("a", "decode"): 1, ("b", "prefill"): 0, ("b", "decode"): 1},
            [("b", "prefill")],
        ),
    ],
)
def test_a_pool_without_workers_on_purpose_is_not_missed(
    tmp_path: Path, values: str, up: dict[tuple[str, str], int], missing: list[tuple[str, str]]
) -> None:
    rules = groups("--set", values)
    (rule,) = [rule for group in rules["groups"] for rule in group["rules"] if rule["alert"] == "KvrelayNoWorker"]
    labels = [{"model": model, "role": role} for model, role in missing]
    text = rule["annotations"]["summary"]
    fired = [
        {
            "exp_labels": one | rule["labels"],
            "exp_annotations": {
                "summary": re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda name, one=one: one[name[1]], text)
            },
        }
        for one in labels
    ]
    series = [
        {
            "series": f'kvrelay_workers_up{{namespace="{NAMESPACE}", pod="{GATEWAY}", model="{model}", role="{role}"}}',
            "values": f"{number}x10",
        }
        for (model, role), number in up.items()
    ]
    asked = {"alertname": "KvrelayNoWorker", "eval_time": "5m", "exp_alerts": fired}
    _run_promtool(tmp_path, rules, [{"interval": "1m", "input_series": series, "alert_rule_test": [asked]}])


def _run_promtool(directory: Path, rules: dict[str, Any], tests: list[dict[str, Any]]) -> None:
    (directory / "rules.yaml").write_text(yaml.safe_dump(rules))
    asked = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (directory / "tests.yaml").write_text(yaml.safe_dump(asked))
    ended = subprocess.run(
        ["promtool", "test", "rules", str(directory / "tests.yaml")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
