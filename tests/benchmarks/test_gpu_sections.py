"""Every section of benchmarks/gpu.py runs, at tiny sizes. Its times mean nothing here."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_parts.checks import check_attention, check_experts, check_linear, check_model, check_sampling
from gpu_parts.checks.comparing import compared
from gpu_parts.engine import batching, gaps, model_dir, start, steps, ttft
from gpu_parts.frame.floors import Limits
from gpu_parts.frame.rows import Checked, Kernel, Row
from gpu_parts.frame.running import Context, Fact, Finding, Note, Run
from gpu_parts.frame.sizes import TINY, Sizes, dry_sizes, full_sizes
from gpu_parts.kernels import attention, experts, fp8_linears, limits, linears, prefill_boxes, sampling, stored_linears
from gpu_parts.kernels.paged import attention_float64, paged_context, random_pool
from safetensors.torch import load_file

from kvrelay.common.sampling import SampledToken
from kvrelay.kernels.linear import grouped

pytestmark = pytest.mark.full  # kernels take a minute in the interpreter

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture
def context(tmp_path: Path) -> Context:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = {"seconds of a hand-off over shared memory": 1.0}
    return Context(dry_sizes(), device, True, tmp_path, time.monotonic() + 100, 7, Limits(1e9, 1e9, 1e9, 1e9), facts)


def found(run: Run, context: Context) -> list[Finding]:
    return list(run(context))


def iter_rows(run: Run, context: Context) -> Iterator[Row]:
    return (finding for finding in run(context) if isinstance(finding, Row))


@pytest.mark.parametrize(
    ("run", "kernel"),
    [
        (check_sampling.check_sampling, Kernel.SAMPLING),
        (check_attention.check_decode_attention, Kernel.DECODE),
        (check_attention.check_prefill_attention, Kernel.PREFILL),
        (check_attention.check_prefill_boxes, Kernel.BOXES),
        (check_attention.check_fp8, Kernel.FP8),
        (check_linear.check_linear, Kernel.LINEAR),
        (check_linear.check_fp8_linear, Kernel.FP8_LINEAR),
        (check_linear.check_stored_linear, Kernel.STORED_LINEAR),
        (check_experts.check_experts, Kernel.EXPERTS),
    ],
)
def test_kernels_are_right(run: Run, kernel: Kernel, context: Context) -> None:
    checks = [finding for finding in found(run, context) if isinstance(finding, Checked)]
    assert checks
    assert {check.kernel for check in checks} == {kernel}
    assert [check.text for check in checks if not check.is_right] == []


@pytest.mark.parametrize(
    "run",
    [
        limits.measure_limits,
        attention.measure_decode,
        attention.measure_decode_fp8,
        attention.measure_prefill,
        prefill_boxes.measure_prefill_boxes,
        sampling.measure_sampling,
        linears.measure_linears,
        fp8_linears.measure_fp8_linears,
        stored_linears.measure_stored_linears,
        experts.measure_experts,
        steps.measure_decode_steps,
        steps.measure_decode_steps_int8,
        steps.measure_decode_steps_fp8,
        steps.measure_decode_steps_4bit,
        steps.measure_prefill_steps,
        ttft.measure_ttft,
        gaps.measure_gaps,
        start.measure_starts,
    ],
)
def test_figures_come_with_what_they_are_compared_with(run: Run, context: Context) -> None:
    rows = [finding for finding in found(run, context) if isinstance(finding, Row)]
    assert rows
    for row in rows:
        assert row.value is None or row.value > 0, row
        assert row.value is not None or row.note, row
        for peer in row.peers:
            assert (peer.value is None) == bool(peer.absence), peer
    if run is steps.measure_prefill_steps:
        assert rows[-1].figure == "prefill, 64 tokens as by default"


@pytest.mark.parametrize("run", [attention.measure_decode, attention.measure_prefill])
def test_our_time_is_told_before_the_peers_are_measured(
    run: Run, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that takes too long ends the section before its row."""

    def stopped(*_: Any, **__: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(attention, "measure_peers", stopped)
    findings = run(context)
    note = next(findings)
    assert isinstance(note, Note)
    assert re.fullmatch(r".* attention, .*: ours [\d.]+ (µs|ms)", note.text), note
    with pytest.raises(TimeoutError):
        next(findings)


@pytest.mark.parametrize("run", [attention.measure_decode, attention.measure_decode_fp8])
def test_the_largest_cells_come_first(run: Run, context: Context) -> None:
    sizes = replace(context.sizes, decode_cells=((1, 20), (1, 90), (4, 30), (4, 20)))
    late = replace(context, sizes=sizes, ends_s=time.monotonic())  # each cell is only named
    figures = [row.figure.split(", ")[-1] for row in run(late) if isinstance(row, Row)]
    assert figures == ["4 x 30", "1 x 90", "4 x 20", "1 x 20"]


def test_the_engine_is_checked_in_bf16_and_ahead(context: Context) -> None:
    checks = [finding for finding in found(check_model.check_model, context) if isinstance(finding, Checked)]
    assert [check.text for check in checks if not check.is_right] == []
    for case in ("float32, step by step", "float32, run ahead", "bfloat16, step by step", "bfloat16, run ahead"):
        assert sum(case in check.case for check in checks) == 1


@pytest.mark.parametrize("damage", ["another token", "another log probability", "not a number"])
def test_a_wrong_token_or_log_probability_is_found(damage: str) -> None:
    expected = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]]).double().log_softmax(-1)
    tokens = [
        SampledToken(1, float(expected[0, 1]), ((2, float(expected[0, 2])),)),
        SampledToken(0, float(expected[1, 0])),
    ]
    assert check_model.largest_error(expected, tokens) < 1e-9
    wrong = {
        "another token": SampledToken(2, float(expected[1, 2])),
        "another log probability": SampledToken(0, float(expected[1, 0]) + 0.5),
        "not a number": SampledToken(0, math.nan),
    }[damage]
    assert not check_model.largest_error(expected, [tokens[0], wrong]) <= 0.1


@pytest.mark.parametrize("sizes", [dry_sizes(), full_sizes()])
def test_each_kernel_of_experts_is_checked(sizes: Sizes) -> None:
    shape = sizes.experts
    rows = [-(-num_tokens * shape.top_k // shape.num_experts) for num_tokens in sizes.expert_checks]
    some, many = grouped.ROWS_PER_EXPERT[1:]
    assert {(one >= some) + (one >= many) for one in rows} == {0, 1, 2}


def test_steps_are_compared_with_full_weights(context: Context) -> None:
    facts = [finding for finding in found(steps.measure_decode_steps, context) if isinstance(finding, Fact)]
    assert [fact.name for fact in facts] == [steps.full_step_fact(*step) for step in context.sizes.steps]
    row = next(iter_rows(steps.measure_decode_steps_4bit, replace(context, facts={facts[0].name: facts[0].value})))
    assert [peer.value for peer in row.peers] == [facts[0].value]
    row = next(iter_rows(steps.measure_decode_steps_4bit, context))
    assert "decode-step did not measure" in row.note
    assert row.verdict(row.goals[1]) == "no peer"


def test_a_start_is_told_by_the_phases_that_its_log_has() -> None:
    lines = [
        (10.0, "started"),
        (10.5, "INFO loading model: 2 MB of weights in 3 files from /model"),
        (11.0, "INFO read 40 % of 2 MB of weights in 1 s"),
        (13.0, "INFO read 2 MB of weights in 2.5 s"),
        (14.0, "INFO capturing decode graphs: 1 of 12, batches of up to 64"),
        (15.0, "INFO capturing decode graphs: 12 of 12, batches of up to 1"),
        (17.0, "INFO decode-1: ready after 6.8 s"),
    ]
    assert start.phases_of(lines) == {
        "imports of the command": 0.5,
        "torch and weights": 2.5,
        "other kernels": 1.0,
        "graphs and sockets": 3.0,
    }


def test_a_start_that_takes_too_long_tells_how_far_it_came(context: Context) -> None:
    model_dir.model_directory(context)
    late = replace(context, ends_s=time.monotonic() + start._TELLING_S + 0.05)
    with pytest.raises(RuntimeError, match=r"the worker is not ready \((no phase ended|imports of the command .*)\)"):
        found(start.measure_starts, late)
    assert time.monotonic() < late.ends_s


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [gaps.percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert gaps.percentile([3.0], 0.99) == 3.0


def test_throughput_is_told_to_the_section_of_the_peer(context: Context) -> None:
    (fact,) = [finding for finding in found(batching.measure_ours, context) if isinstance(finding, Fact)]
    assert fact.value > 0


@pytest.mark.parametrize("damage", ["one element", "not written"])
def test_a_damaged_result_is_found(damage: str) -> None:
    expected = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).double()
    actual = expected.bfloat16()
    assert all(check.is_right for check in compared(Kernel.LINEAR, "whole", actual, expected))
    if damage == "one element":
        actual[17, 3] += 1
    else:
        actual[17] = torch.nan
    assert not all(check.is_right for check in compared(Kernel.LINEAR, "damaged", actual, expected))


def test_the_reference_is_torchs_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(5, 4, 16, generator=generator).double()
    keys, values = torch.randn(2, 2, 9, 16, generator=generator).double()
    mask = torch.ones(5, 9, dtype=torch.bool).tril(diagonal=4)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), keys, values, attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(attention_float64(query, torch.stack((keys, values))), expected.transpose(0, 1))


def test_contexts_are_found_again_in_their_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    pool = random_pool(TINY, 6, 2, torch.float32, generator)
    paged = paged_context(pool, 1, (3, 40), generator)
    blocks = paged.block_tables[1, :3].tolist()
    assert len({*blocks, int(paged.block_tables[0, 0])}) == 4
    expected = torch.cat([pool[block, 1, 0] for block in blocks], dim=1)[:, :40]
    assert torch.equal(paged.keys_values(1)[0], expected)
    with pytest.raises(ValueError, match="in a pool of 6"):
        paged_context(pool, 1, (97,), generator)


def test_the_model_on_disk_is_one_that_others_read(tmp_path: Path) -> None:
    model_dir.write_model(tmp_path / "model", TINY, torch.Generator().manual_seed(0))
    places = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["weight_map"]
    for name in set(places.values()):
        tensors = load_file(tmp_path / "model" / name)
        assert set(tensors) == {tensor for tensor, file in places.items() if file == name}
        assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    layer = load_file(tmp_path / "model" / "layer-001.safetensors")
    assert layer["model.layers.1.mlp.gate_proj.weight"].shape == (64, 32)


def test_a_dry_run_of_the_command_says_that_its_times_mean_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--dry-run", "--only", "handoff", "--json", str(tmp_path / "out.json")]
    environment = {**os.environ, "PYTHONSAFEPATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("DRY RUN")
    assert done.stdout.rstrip().endswith("ITS TIMES MEAN NOTHING.")
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["is_dry_run"]
    figures = [row["figure"] for row in document["rows"]]
    assert [name for name in figures if name.startswith("hand-off")] == figures[4:]
    assert len(figures[4:]) == 3  # over TCP, through shared memory, and sealed there
    assert [section["failure"] for section in document["sections"]] == [None, None]


def test_without_a_device_the_command_names_the_way_out() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a device")
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--dry-run" in done.stderr
