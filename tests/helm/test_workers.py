"""Workers of one pod: image, GPUs, and shared memory of their node."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from .chart import CHART, env_of, helm, needs_helm, objects, pod_of, rendered


@needs_helm
@pytest.mark.parametrize(
    ("resource", "tag", "worker"),
    [("nvidia.com/gpu", "", "9.8.7"), ("", "", "9.8.7-cpu"), ("", "mine", "mine"), ("nvidia.com/gpu", "mine", "mine")],
)
def test_workers_without_a_gpu_run_the_image_for_cpus(tmp_path: Path, resource: str, tag: str, worker: str) -> None:
    """Workers without GPUs run the ``-cpu`` image of tools/images.sh, unless a tag is set."""
    chart = shutil.copytree(CHART, tmp_path / "chart")
    text = (chart / "Chart.yaml").read_text()
    (chart / "Chart.yaml").write_text(re.sub(r"^appVersion: .*$", 'appVersion: "9.8.7"', text, flags=re.MULTILINE))
    ended = helm(
        "template", "x", str(chart), "--set", f"image.tag={tag},image.registry=r,decode.gpu.resource={resource}"
    )
    images = re.findall(r"image: (\S+)", ended.stdout)
    assert set(images) == {
        f"r/kvrelay-gateway:{tag or '9.8.7'}",
        f"r/kvrelay-worker:{worker}",
        f"r/kvrelay-worker:{tag or '9.8.7'}",
    }


@needs_helm
def test_gpus_are_asked_for_by_any_name() -> None:
    found = objects("--set", r"decode.gpu.resource=nvidia\.com/mig-3g\.40gb", "--set", "prefill.gpu.resource=")
    decode = pod_of(found, "decode-worker")["containers"][0]
    prefill = pod_of(found, "prefill-worker")["containers"][0]
    assert decode["resources"]["limits"] == {"nvidia.com/mig-3g.40gb": 1}
    assert "limits" not in prefill["resources"]
    assert env_of(pod_of(found, "prefill-worker"))["KVRELAY_DEVICE"] == "cpu"


@needs_helm
def test_decode_workers_read_images_if_there_are_no_prefill_workers_on_purpose() -> None:
    def images(values: str) -> str | None:
        return env_of(pod_of(objects("--set", values), "decode-worker")).get("KVRELAY_IMAGES")

    assert images("prefill.replicas=1") is None
    assert images("prefill.replicas=0") == "true"
    assert images("prefill.replicas=0,decode.settings.images=false") == "false"
    keda = "prefill.autoscaling.keda.enabled=true,prefill.autoscaling.keda.prometheus=http://p"
    assert images(f"prefill.replicas=0,{keda}") is None
    names = "models.a.model.name=org/a,models.b.model.name=org/b"
    found = objects("--set", f"{names},models.a.prefill.replicas=0")
    read = {model: env_of(pod_of(found, f"{model}-decode-worker")).get("KVRELAY_IMAGES") for model in "ab"}
    assert read == {"a": "true", "b": None}


@needs_helm
def test_every_rank_of_every_stage_has_a_gpu() -> None:
    found = objects("--set", "prefill.pipelineParallel=2,decode.tensorParallel=4,decode.pipelineParallel=2")
    for component, num_stages, num_gpus in (("prefill-worker", 2, 2), ("decode-worker", 2, 8)):
        pod = pod_of(found, component)
        assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": num_gpus}
        assert env_of(pod)["KVRELAY_PIPELINE_PARALLEL"] == str(num_stages)
    spread = objects("--set", "decode.tensorParallel=4,decode.pipelineParallel=2,decode.nodesPerWorker=2")
    pod = spread["StatefulSet", "relay-kvrelay-decode-worker"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 4}


@needs_helm
def test_workers_of_one_node_meet_in_a_directory_of_the_node() -> None:
    found = objects("--set", "sameHost.hostPath=/var/lib/kvrelay")
    for component in ("prefill-worker", "decode-worker"):
        pod = pod_of(found, component)
        (container,) = pod["containers"]
        directory = env_of(pod)["KVRELAY_SHARED_MEMORY"]
        assert {"name": "same-host", "mountPath": directory} in container["volumeMounts"]
        assert {"name": "same-host", "hostPath": {"path": "/var/lib/kvrelay", "type": "Directory"}} in pod["volumes"]
    assert "KVRELAY_SHARED_MEMORY" not in env_of(pod_of(found, "gateway"))
    assert "same-host" not in rendered()
    ended = helm("template", str(CHART), "--set", "sameHost.hostPath=/x,decode.settings.shared_memory=off")
    assert "decode.settings.shared_memory and sameHost.hostPath say different things" in ended.stderr
