"""Settings that must hold before the first import: where Triton runs, and how many examples hypothesis tries.

``make test`` leaves out tests marked ``full`` and uses the profile ``fast``. ``make test-all`` runs everything with the profile
``all``. ``make fuzz`` tries the most examples. A test reads its number of examples from the active profile. Tests in
``FULL_FOLDERS`` are ``full``, except those marked ``fast``. Files marked ``long`` come first, so that no process is alone with one
of them at the end.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Triton reads this when it is imported and when a kernel is defined, which is too early for a fixture. Without an
# NVIDIA device the kernels run in Triton's interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Two processes of tests share the cores, so each uses one thread for matrix products.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadline: a shared machine may pause for a second in any example.
settings.register_profile("fast", max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("all", settings.get_profile("fast"), max_examples=60)
settings.register_profile("fuzz", settings.get_profile("fast"), max_examples=600)
settings.load_profile("fast")

FULL_FOLDERS = ("e2e", "reliability", "cluster")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of ``FULL_FOLDERS``, and put those that are marked ``long`` in front."""
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in FULL_FOLDERS and not item.get_closest_marker("fast"):
            item.add_marker(pytest.mark.full)
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture
def socket_directory() -> Iterator[Path]:
    """A directory with a short path, because a unix socket's address has at most 107 bytes and ``tmp_path`` may be
    longer."""
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        yield Path(directory)
