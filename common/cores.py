"""How many cores there are for this process."""

from __future__ import annotations

import os
import sys


def available_cores() -> int:
    """Cores this process may use. A container's limit on CPU *time* leaves it all cores, and is not counted."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else (os.cpu_count() or 1)
