"""Serves the custom metrics API of Kubernetes from a pod, with the current values of the pods' /metrics.

python adapter.py NAMESPACE. It does as much of prometheus-adapter's work as a HorizontalPodAutoscaler asks for.
"""

from __future__ import annotations

import datetime
import http.server
import json
import ssl
import sys
import tempfile
import urllib.parse
import urllib.request

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from kubernetes import client, config

GROUP = "/apis/custom.metrics.k8s.io/v1beta1"
METRICS = ("kvrelay_waiting_prompt_tokens", "kvrelay_kv_cache_usage_perc", "kvrelay_num_requests_running")


def metric_of(pod: client.V1Pod, name: str) -> float:
    """The sum of the samples of ``name``. Raises OSError if the pod does not answer."""
    (port,) = [port.container_port for port in pod.spec.containers[0].ports if port.name == "admin"]
    with urllib.request.urlopen(f"http://{pod.status.pod_ip}:{port}/metrics", timeout=3) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


class Handler(http.server.BaseHTTPRequestHandler):
    """Two paths: the list of metrics, and one metric of all pods that match a selector."""

    def do_GET(self) -> None:
        """Answer one of the two paths."""
        url = urllib.parse.urlsplit(self.path)
        if url.path.rstrip("/") == GROUP:
            resources = [
                {
                    "name": f"pods/{name}",
                    "singularName": "",
                    "namespaced": True,
                    "kind": "MetricValueList",
                    "verbs": ["get"],
                }
                for name in METRICS
            ]
            version = GROUP.removeprefix("/apis/")
            self.answer(
                {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
            )
            return
        name = url.path.rsplit("/", 1)[1]
        selector = urllib.parse.parse_qs(url.query).get("labelSelector", [""])[0]
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        items = []
        for pod in client.CoreV1Api().list_namespaced_pod(sys.argv[1], label_selector=selector).items:
            try:
                value = metric_of(pod, name)
            except OSError:
                continue
            items.append(
                {
                    "describedObject": {
                        "kind": "Pod",
                        "namespace": sys.argv[1],
                        "name": pod.metadata.name,
                        "apiVersion": "/v1",
                    },
                    "metricName": name,
                    "timestamp": now,
                    "value": f"{round(value * 1000)}m",
                    "selector": None,
                }
            )
        self.answer(
            {"kind": "MetricValueList", "apiVersion": GROUP.removeprefix("/apis/"), "metadata": {}, "items": items}
        )

    def answer(self, body: object) -> None:
        """Send ``body`` as JSON."""
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    """Serve for ever, with a certificate made at the start."""
    config.load_incluster_config()
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.datetime.now(datetime.UTC)
    until = now + datetime.timedelta(days=1)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, until)
    server = http.server.ThreadingHTTPServer(("", 6443), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile() as file:
        file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        file.write(builder.sign(key, SHA256()).public_bytes(Encoding.PEM))
        file.flush()
        context.load_cert_chain(file.name)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
