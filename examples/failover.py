"""Kills a worker during an answer. The answer continues after a pause, with the same text.

Starts a gateway, a prefill worker and two decode workers on this machine. Asks once without a failure. Then asks again, and kills
the decode worker that writes the answer.
"""

import os
import signal
import time
import urllib.request

from openai import OpenAI

from kvrelay.launcher.local.deployment import LocalDeployment
from kvrelay.launcher.models import resolve_model
from kvrelay.launcher.settings import LocalSettings

NUM_BEFORE = 10  # pieces of the answer before the kill


def ask(deployment: LocalDeployment, *, kills: bool) -> tuple[str, float]:
    """The answer, and its longest pause in seconds."""
    client = OpenAI(base_url=f"{deployment.url}/v1", api_key="none")
    stream = client.completions.create(
        model=client.models.list().data[0].id, prompt="Once upon a time", seed=7, max_tokens=200, stream=True
    )
    text, num_pieces, longest_s, last_s = "", 0, 0.0, time.monotonic()
    for chunk in stream:
        text, num_pieces = text + chunk.choices[0].text, num_pieces + 1
        print(chunk.choices[0].text, end="", flush=True)
        longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()
        if kills and num_pieces == NUM_BEFORE:
            name = busy_decode_worker(deployment)
            os.kill(deployment.pids[name], signal.SIGKILL)
            print(f" [{name} is killed] ", end="", flush=True)
    print()
    return text, longest_s


def busy_decode_worker(deployment: LocalDeployment) -> str:
    """The decode worker that runs the request, by the workers' own metrics."""
    for name in ("decode-0", "decode-1"):
        with urllib.request.urlopen(f"{deployment.admin_urls[name]}/metrics", timeout=10) as answer:  # noqa: S310 - of this machine
            if b"\nkvrelay_num_requests_running 1.0" in answer.read():
                return name
    raise RuntimeError("the answer is complete already")


settings = LocalSettings.of(port=0, decode=2, kv_memory_mb=256, dtype="float32")
with LocalDeployment.from_settings(settings, resolve_model("demo")) as deployment:
    deployment.wait_ready(timeout_s=180)
    undisturbed, _ = ask(deployment, kills=False)
    text, pause_s = ask(deployment, kills=True)
print(f"the same text: {text == undisturbed}; the longest pause took {pause_s:.2f} s")
