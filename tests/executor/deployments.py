"""Real deployments for executors to talk to: a gateway, a prefill worker and a decode worker, each a process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvrelay.launcher.local import LocalDeployment
from kvrelay.launcher.settings import LocalSettings


@contextmanager
def running(settings: LocalSettings, directory: Path) -> Iterator[LocalDeployment]:
    """Ready to serve; stopped afterwards."""
    with LocalDeployment.from_settings(settings, directory) as deployment:
        deployment.wait_ready(timeout_s=180)
        yield deployment
