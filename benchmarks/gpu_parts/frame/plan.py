"""The sections of a run: their order, their time, and whether their checks allow them to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpu_parts.frame.rows import Kernel
from gpu_parts.frame.running import Section

CHECKS_ONLY = "checks"
_RESERVED = 0.25  # share of the later sections' longest times that is kept for them,
_LEAST = 0.5  # but a section may have this share of what is left: without checks and limits nothing is measured
# Until a section with a whole model, a start, and rounds of streams have a figure on an H200: measured, and twice estimated.
_LOAD_S, _START_S, _STREAMS_S = 12.0, 40.0, 30.0
_OF_A_STEP = (Kernel.DECODE, Kernel.PREFILL, Kernel.MODEL)
_WITH_LINEARS, _WITH_STORED_LINEARS = (*_OF_A_STEP, Kernel.LINEAR), (*_OF_A_STEP, Kernel.STORED_LINEAR)

LIMITS = Section("limits", "gpu_parts.kernels.limits:measure_limits", 60)
CHECKS: dict[Kernel, Section] = {
    Kernel.SAMPLING: Section("check-sampling", "gpu_parts.checks.check_sampling:check_sampling", 40),
    Kernel.DECODE: Section("check-decode", "gpu_parts.checks.check_attention:check_decode_attention", 40),
    Kernel.PREFILL: Section("check-prefill", "gpu_parts.checks.check_attention:check_prefill_attention", 50),
    Kernel.BOXES: Section("check-boxes", "gpu_parts.checks.check_attention:check_prefill_boxes", 25),
    Kernel.FP8: Section("check-fp8", "gpu_parts.checks.check_attention:check_fp8", 30),
    Kernel.LINEAR: Section("check-linear", "gpu_parts.checks.check_linear:check_linear", 35),
    Kernel.FP8_LINEAR: Section("check-fp8-linear", "gpu_parts.checks.check_linear:check_fp8_linear", 20),
    Kernel.STORED_LINEAR: Section("check-linear-4bit", "gpu_parts.checks.check_linear:check_stored_linear", 30),
    Kernel.EXPERTS: Section("check-experts", "gpu_parts.checks.check_experts:check_experts", 50),
    Kernel.MODEL: Section("check-model", "gpu_parts.checks.check_model:check_model", 120),
}
FIGURES: tuple[Section, ...] = (
    Section("decode-step", "gpu_parts.engine.steps:measure_decode_steps", 110, _WITH_LINEARS, _LOAD_S),
    Section("prefill", "gpu_parts.engine.steps:measure_prefill_steps", 45, _OF_A_STEP, _LOAD_S),
    Section("decode-attention", "gpu_parts.kernels.attention:measure_decode", 90, (Kernel.DECODE,)),
    Section("prefill-attention", "gpu_parts.kernels.attention:measure_prefill", 70, (Kernel.PREFILL,)),
    Section("prefill-boxes", "gpu_parts.kernels.prefill_boxes:measure_prefill_boxes", 15, (Kernel.BOXES,)),
    Section("sampling", "gpu_parts.kernels.sampling:measure_sampling", 30, (Kernel.SAMPLING,)),
    Section("experts", "gpu_parts.kernels.experts:measure_experts", 30, (Kernel.EXPERTS,)),
    Section("handoff", "gpu_parts.engine.handoff:measure_handoff", 50),
    Section("ttft", "gpu_parts.engine.ttft:measure_ttft", 70, _OF_A_STEP, _LOAD_S),
    Section("gaps", "gpu_parts.engine.gaps:measure_gaps", 70, _OF_A_STEP, _STREAMS_S),
    Section("start", "gpu_parts.engine.start:measure_starts", 90, _OF_A_STEP, _START_S),
    Section("batching", "gpu_parts.engine.batching:measure_ours", 45, _OF_A_STEP, _LOAD_S),
    Section("batching-peer", "gpu_parts.engine.batching:measure_theirs", 75, least_s=_STREAMS_S),
    # The figures of default settings come before this. Those of options come last, and are the first to be skipped.
    Section("decode-attention-fp8", "gpu_parts.kernels.attention:measure_decode_fp8", 35, (Kernel.DECODE, Kernel.FP8)),
    Section("linears", "gpu_parts.kernels.linears:measure_linears", 35, (Kernel.LINEAR,)),
    Section("linears-fp8", "gpu_parts.kernels.fp8_linears:measure_fp8_linears", 15, (Kernel.FP8_LINEAR,)),
    Section("linears-4bit", "gpu_parts.kernels.stored_linears:measure_stored_linears", 20, (Kernel.STORED_LINEAR,)),
    Section("decode-step-int8", "gpu_parts.engine.steps:measure_decode_steps_int8", 45, _WITH_LINEARS, _LOAD_S),
    Section("decode-step-fp8", "gpu_parts.engine.steps:measure_decode_steps_fp8", 45, _WITH_LINEARS, _LOAD_S),
    Section("decode-step-4bit", "gpu_parts.engine.steps:measure_decode_steps_4bit", 45, _WITH_STORED_LINEARS, _LOAD_S),
)
NAMES = (CHECKS_ONLY, *(section.name for section in FIGURES))


def chosen(only: Sequence[str]) -> list[Section]:
    """The sections of a run in order: limits, the checks of all timed kernels, then the figures.

    ``only``: names of figures, or ``checks`` for all checks; empty: everything.
    """
    figures = [section for section in FIGURES if not only or section.name in only]
    needed = {kernel for section in figures for kernel in section.kernels}
    has_all = not only or CHECKS_ONLY in only
    return [LIMITS, *(check for kernel, check in CHECKS.items() if has_all or kernel in needed), *figures]


def time_for(section: Section, later: Sequence[Section], remaining_s: float) -> float:
    """The seconds for ``section``: its longest time, but the later sections keep a share of theirs."""
    reserved_s = _RESERVED * sum(other.longest_s for other in later)
    return max(min(section.longest_s, max(remaining_s - reserved_s, _LEAST * remaining_s)), 0.0)


def refusal(section: Section, is_right: Mapping[str, bool]) -> str | None:
    """Why ``section`` must not be timed, or None. ``is_right``: results of the completed kernel checks."""
    wrong = [kernel for kernel in section.kernels if not is_right.get(kernel, False)]
    return f"refused: {', '.join(wrong)} did not pass the numerics" if wrong else None
