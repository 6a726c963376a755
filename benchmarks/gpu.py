"""Measures kvrelay's engine on one GPU: numerics first, then every figure with its floor and its peers. One command, offline.

    PYTHONPATH=src python benchmarks/gpu.py --json gpu.json          # at most 8 minutes on one H200
    PYTHONPATH=src python benchmarks/gpu.py --only decode-step       # one section, and its numerics
    PYTHONPATH=src python benchmarks/gpu.py --dry-run                # runs all code on a CPU, with tiny sizes

It first measures the device's best rates (copy bandwidth, bf16 products). A floor is bytes or operations over such a rate. Then it
compares every kernel's results with float64 on fresh random numbers. It does not time what is wrong or unchecked. All figures are
medians after a warm-up. Kernels are timed by the device's events with a cold cache, the whole engine by wall time. The model has
random weights of Llama-3-8B's shape, 16 GB that are written to memory or disk for the run.

Every section runs in a separate process under a time limit. A failed section is reported, and the others continue. Peers run in the
same section; missing peers are named. An interrupted run reports what it has. The exit code is 1 if numerics fail, 3 if a section
failed, else 0.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import time
from pathlib import Path

import click

_NUMERICS_FAILED, _SECTION_FAILED = 1, 3
# torch is not asked, because that would open the device before processes are forked.
_DEVICE_SIGNS = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version"))
_CLOSING_S = 8.0  # of the budget: the last section is ended, and the report printed
_DRY = "DRY RUN: every way is gone, with sizes of next to nothing. ITS TIMES MEAN NOTHING."


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", multiple=True, metavar="SECTION", help="Only this one; again for more, '?' names all.")
@click.option("--budget-s", default=470.0, show_default=True, type=click.FloatRange(1), help="Time of the whole run.")
@click.option(
    "--json", "output", type=click.Path(path_type=Path, dir_okay=False), help="Everything as JSON, finding by finding."
)
@click.option(
    "--work-dir", type=click.Path(path_type=Path, file_okay=False), help="Where the model is written; removed."
)
@click.option("--seed", type=int, help="Of all random numbers; default: another one in every run.")
@click.option("--dry-run", is_flag=True, help="Go all ways with tiny sizes, without a GPU in Triton's interpreter.")
def main(
    only: tuple[str, ...], budget_s: float, output: Path | None, work_dir: Path | None, seed: int | None, dry_run: bool
) -> None:
    """Check, measure and print. Needs one CUDA device, or --dry-run."""
    has_device = any(sign.exists() for sign in _DEVICE_SIGNS)
    if not has_device and not dry_run:
        raise click.UsageError("there is no NVIDIA device here; --dry-run goes all ways without one")
    if not has_device:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, here and in every process
    os.environ.setdefault(
        "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
    )  # the check for a device must not open it, because processes are forked
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the fork server must not have threads either
    # The fork server imports its preloads before it gets this process's path.
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    chosen_seed = secrets.randbits(31) if seed is None else seed
    sys.exit(_run(only, budget_s, output, work_dir, chosen_seed, "cuda" if has_device else "cpu", is_dry=dry_run))


def _run(
    only: tuple[str, ...],
    budget_s: float,
    output: Path | None,
    work_dir: Path | None,
    seed: int,
    device_type: str,
    *,
    is_dry: bool,
) -> int:
    ends_s = time.monotonic() + budget_s - _CLOSING_S  # imports count, too
    # Import only after the environment is set.
    from gpu_parts.engine.model_dir import scratch_directory  # noqa: PLC0415
    from gpu_parts.frame.plan import NAMES, chosen  # noqa: PLC0415
    from gpu_parts.frame.running import Context  # noqa: PLC0415
    from gpu_parts.frame.session import Session  # noqa: PLC0415
    from gpu_parts.frame.sizes import dry_sizes, full_sizes  # noqa: PLC0415

    unknown = [name for name in only if name not in NAMES]
    if unknown:
        raise click.UsageError(f"--only is {unknown[0]!r}; it must be one of {', '.join(NAMES)}")
    sizes = dry_sizes() if is_dry else full_sizes()
    shape = sizes.shape
    nbytes = (shape.num_layer_weights + 2 * shape.num_head_weights) * shape.itemsize
    if is_dry:
        click.echo(f"{_DRY}\n")
    with tempfile.TemporaryDirectory(prefix="kvrelay-gpu-", dir=work_dir or scratch_directory(nbytes)) as work:
        context = Context(sizes, device_type, is_dry, Path(work), ends_s, seed)
        session = Session(context, lambda line: print(line, flush=True), output)
        try:
            session.run(chosen(only))
        finally:  # also of a run that is interrupted, and before the model is removed, which takes seconds
            print(f"\nseed {seed}\n{session.report()}", flush=True)
    if is_dry:
        print(f"\n{_DRY}")
    if session.numerics_failed:
        return _NUMERICS_FAILED
    return _SECTION_FAILED if session.sections_failed else 0


if __name__ == "__main__":
    main()
