"""What holds for the whole suite before the first import: where Triton runs, and how much hypothesis tries.

``make test`` leaves out what is marked ``full`` and takes the profile ``fast``; ``make test-all`` runs everything with
the profile ``all``; ``make fuzz`` goes furthest. A test reads the number of its examples from the profile in force.
Whole folders are ``full``, but for their tests that are marked ``fast``.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Triton reads this when it is imported and when a kernel is defined: too late for any fixture. Without an
# NVIDIA device the kernels run in Triton's interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Two processes of tests share the cores: neither takes all of them for its products of matrices.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadline: a shared machine may stop for a second at any example.
settings.register_profile("fast", max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("all", settings.get_profile("fast"), max_examples=60)
settings.register_profile("fuzz", settings.get_profile("fast"), max_examples=600)
settings.load_profile("fast")

FULL_FOLDERS = ("e2e", "reliability", "cluster")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what -m does not name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks by folder."""
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in FULL_FOLDERS and not item.get_closest_marker("fast"):
            item.add_marker(pytest.mark.full)


@pytest.fixture
def socket_directory() -> Iterator[Path]:
    """A directory with a short path: a unix socket's address has 107 bytes, and ``tmp_path`` may take all of them."""
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        yield Path(directory)
