"""CPUs that do not sleep, for benchmarks that ask what sleep costs.

A CPU without work sleeps until it is interrupted. To wake it takes microseconds on a machine of one's own, and much longer on a
virtual one whose host takes the core away meanwhile; its caches are cold then, too. A process of the kernel's idle class, which
gets next to nothing of what others want, keeps a CPU awake. It would disturb where CPUs share a core, or a quota bounds their time.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

# For as long as whoever started it is there, however that ends.
_SPIN = "while kill -0 $PPID 2>/dev/null; do i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; done"


@contextmanager
def awake_cpus() -> Iterator[None]:
    """Within it no CPU that this process may use sleeps."""
    with ExitStack() as stack:
        for cpu in sorted(os.sched_getaffinity(0)):
            process = subprocess.Popen(["sh", "-c", _SPIN])
            stack.callback(process.wait)
            stack.callback(process.kill)
            os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setaffinity(process.pid, {cpu})
        yield
