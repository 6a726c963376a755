"""Settings of the whole suite that must be in force before the first import."""

import os
from pathlib import Path

# Triton reads this when it is imported and when a kernel is defined: too late for any fixture. Without an
# NVIDIA device the kernels run in Triton's interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
