"""Every kernel compiles for every target within its limits, and the figures read from the binaries are right.

These tests use processes of their own, because an interpreted kernel cannot be compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvrelay.kernels.compile_check import spill_limit

pytestmark = pytest.mark.long

_SPILLING = """
import dataclasses, json
from kvrelay.kernels import compile_check as check
launch = next(l for l in check.launches(("cuda", 80)) if l.kernel == "draw_kernel")
few = dataclasses.replace(launch, options={**launch.options, "maxnreg": 24})
cuda = check.compile_launch(few, ("cuda", 80))
limit = check.spill_limit(check.triton.__version__)
print(json.dumps([cuda.registers, cuda.spill_bytes, cuda.broken_limits(cuda.shared_bytes, limit)]))
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    return {**inherited, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}


def _run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.full
@pytest.mark.timeout(1800)  # some minutes on two idle cores, if nothing is kept from an earlier run
def test_every_kernel_compiles_within_the_limits(environment: dict[str, str], cache: pytest.Cache) -> None:
    """Triton keeps what it has compiled among pytest's own files, by the source of a kernel and of all that it calls. So the next
    run compiles only what has changed."""
    environment |= {"TRITON_CACHE_DIR": str(cache.mkdir("triton"))}
    done = _run(environment, "-m", "kvrelay.kernels.compile_check", "--json", "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["target"] for row in rows} == {"cuda:80", "cuda:90", "cuda:100", "hip:gfx942"}
    assert {row["kernel"] for row in rows} == {
        "_add_splits_kernel",
        "_bitmask_kernel",
        "_convolution_kernel",
        "_decode_split_kernel",
        "_delta_rule_kernel",
        "_dequantise_groups_kernel",
        "_dequantise_kernel",
        "_digest_kernel",
        "_expand_kernel",
        "_few_down_kernel",
        "_few_gate_up_kernel",
        "_fp8_linear_kernel",
        "_group_scaled_linear_kernel",
        "_grouped_linear_kernel",
        "_index_scores_kernel",
        "_keep_inputs_kernel",
        "_latent_prefill_kernel",
        "_latent_split_kernel",
        "_penalties_kernel",
        "_prefill_attention_kernel",
        "_rms_norm_kernel",
        "_rotary_kv_write_kernel",
        "_round_rows_kernel",
        "_shrink_kernel",
        "_state_space_kernel",
        "_swiglu_kernel",
        "_vector_linear_kernel",
        "_weight_only_linear_kernel",
        "decode_combine_kernel",
        "draw_kernel",
        "group_kernel",
    }
    assert all(row["registers"] > 0 and row["programs"] > 0 for row in rows)
    _check_attention([row for row in rows if "attention" in row["kernel"] or "decode_split" in row["kernel"]])
    _check_latents([row for row in rows if row["kernel"].startswith("_latent")])
    _check_boxes([row for row in rows if row["kernel"] == "_prefill_attention_kernel"])
    _check_linears([row for row in rows if row["kernel"] == "_weight_only_linear_kernel"])
    _check_group_scaled([row for row in rows if row["kernel"] == "_group_scaled_linear_kernel"])
    _check_vectors([row for row in rows if row["kernel"] == "_vector_linear_kernel"])
    _check_fp8([row for row in rows if row["kernel"] in ("_fp8_linear_kernel", "_round_rows_kernel")])
    _check_experts([row for row in rows if row["kernel"] == "_grouped_linear_kernel"])
    _check_few_routes([row for row in rows if row["kernel"].startswith("_few")])
    _check_adapters([row for row in rows if row["kernel"] in ("_shrink_kernel", "_expand_kernel")])
    _check_digests([row for row in rows if row["kernel"] == "_digest_kernel"])
    _check_recurrent([row for row in rows if row["kernel"] in ("_delta_rule_kernel", "_state_space_kernel")])


def _check_recurrent(rows: list[dict[str, Any]]) -> None:
    """Enough warps fit to have many loads of states under way, and each holds its part of a state in registers."""
    assert len(rows) == 3 * 2 * 4  # layers; prompts and single tokens; targets
    for row in rows:
        assert row["programs"] >= (10 if "4 MiB" in row["case"] else 12), row


def _check_digests(rows: list[dict[str, Any]]) -> None:
    """A warp has 8 KiB on their way at a time, a word in each load, and many warps fit."""
    for row in rows:
        if row["loops"] is not None:
            assert row["loops"]["global_loads"] == {"8": 32}, row
        assert row["programs"] >= 16, row


def _check_vectors(rows: list[dict[str, Any]]) -> None:
    """Weights and the row are loaded by 16 bytes, beside scales and zeros of groups, without tensor cores. Enough warps
    fit to have many loads under way."""
    assert {row["target"] for row in rows if "4 bits" in row["case"]} == {
        "cuda:80",
        "cuda:90",
        "cuda:100",
        "hip:gfx942",
    }
    assert {row["target"] for row in rows if "e4m3" in row["case"]} == {"cuda:90", "cuda:100"}
    for row in (row for row in rows if row["loops"] is not None):
        loads = row["loops"]["global_loads"]
        assert set(loads) <= ({"1", "2", "4", "16"} if " by " in row["case"] else {"16"}), row
        assert loads["16"] >= 5, row
        assert row["loops"]["matrix_count"] == 0, row
        assert row["programs"] * row["threads"] >= 12 * 32, row


def _check_few_routes(rows: list[dict[str, Any]]) -> None:
    """Weights are loaded by 16 bytes, beside rows and experts' numbers, without tensor cores. Enough warps fit to have
    many loads under way."""
    for row in (row for row in rows if row["loops"] is not None):
        loads = row["loops"]["global_loads"]
        assert set(loads) <= ({"2", "4", "8", "16"} if row["kernel"] == "_few_down_kernel" else {"8", "16"}), row
        # One of each warp's rows of gate and of up, twice; without a gate, half as many.
        assert loads["16"] >= (2 if "another activation" in row["case"] else 4), row
        assert row["kernel"] == "_few_down_kernel" or loads.get("8", 0) <= 1, row  # only the token's row
        assert row["loops"]["matrix_count"] == 0, row
        assert row["programs"] * row["threads"] >= 12 * 32, row


def _check_experts(rows: list[dict[str, Any]]) -> None:
    """Full weights and gathered rows are loaded by 16 bytes, stored ones mostly by 8 or more. Products use tensor
    cores, and many rows use the newest instruction."""
    for name in ("mxfp4", "4 bits by 128", "4 bits by 64"):
        cases = [row["target"] for row in rows if name in row["case"]]
        assert sorted(cases) == sorted(3 * ["cuda:80", "cuda:90", "cuda:100", "hip:gfx942"]), name
    for row in (row for row in rows if row["loops"] is not None):
        loads = {int(width): count for width, count in row["loops"]["global_loads"].items()}
        if any(name in row["case"] for name in ("mxfp4", " by ")):
            assert sum(count for width, count in loads.items() if width < 8) <= 4, row
            assert 16 in loads, row
        else:
            assert set(loads) == {16}, row
        newest = {"cuda:80": "mma", "cuda:90": "wgmma", "cuda:100": "tcgen05"}[row["target"]]
        assert row["loops"]["matrix_kind"] == ("mma" if " 16 rows" in row["case"] else newest), row


def _check_adapters(rows: list[dict[str, Any]]) -> None:
    """Matrices with addresses from a table are loaded by 16 bytes, beside sums of splits, and multiplied on tensor
    cores."""
    assert len(rows) == 4 * 3 * 4  # targets; tilings; one part and three parts, of both kernels
    for row in (row for row in rows if row["loops"] is not None):
        loads = set(row["loops"]["global_loads"])
        assert loads == {"16"} if row["kernel"] == "_shrink_kernel" else {"16"} <= loads <= {"8", "16"}, row
        if not row["case"].startswith("fp32"):
            newest = {"cuda:80": "mma", "cuda:90": "wgmma", "cuda:100": "tcgen05"}[row["target"]]
            assert row["loops"]["matrix_kind"] == ("mma" if "few rows" in row["case"] else newest), row
        assert row["programs"] >= 3, row


def _check_group_scaled(rows: list[dict[str, Any]]) -> None:
    """Values are loaded by 8 bytes or more, beside scales and zeros. Many rows use the newest tensor-core
    instruction."""
    assert {row["target"] for row in rows if "e4m3" in row["case"]} == {"cuda:90", "cuda:100"}
    assert {row["target"] for row in rows if "4 bits" in row["case"]} == {
        "cuda:80",
        "cuda:90",
        "cuda:100",
        "hip:gfx942",
    }
    for row in (row for row in rows if row["loops"] is not None):
        is_few = any(f" {count} rows" in row["case"] for count in (16, 32))
        newest = {"cuda:80": "mma", "cuda:90": "wgmma", "cuda:100": "tcgen05"}[row["target"]]
        assert row["loops"]["matrix_kind"] == ("mma" if is_few else newest), row
        loads = {int(width): count for width, count in row["loops"]["global_loads"].items()}
        # Scales and zeros take a few loads of one element each. Values loaded one by one would take dozens.
        assert sum(count for width, count in loads.items() if width < 8) <= 8, row
        assert sum(count for width, count in loads.items() if width >= 8) >= 1, row
        if row["case"].endswith(" 16 rows"):
            assert row["programs"] >= 4, row


def _check_fp8(rows: list[dict[str, Any]]) -> None:
    """Only targets whose tensor cores multiply e4m3 by e4m3. Both sides are loaded by 16 bytes, beside scales of
    groups."""
    assert {row["target"] for row in rows} == {"cuda:90", "cuda:100"}
    assert len(rows) == 2 * (2 * 5 + 3)
    for row in (row for row in rows if row["kernel"] == "_fp8_linear_kernel"):
        loads = row["loops"]["global_loads"]
        assert set(loads) == ({"16"} if "by channel" in row["case"] else {"4", "16"}), row
        assert loads.get("4", 0) <= 6, row
        assert row["loops"]["shared_byte_loads"] == 0, row
        is_few = any(f" {count} rows" in row["case"] for count in (16, 32))
        newest = {"cuda:90": "wgmma", "cuda:100": "tcgen05"}[row["target"]]
        assert row["loops"]["matrix_kind"] == ("mma" if is_few else newest), row
        if is_few:
            assert row["programs"] >= 3, row


def _check_linears(rows: list[dict[str, Any]]) -> None:
    """Weights and activations are loaded by 16 bytes and multiplied on tensor cores, e4m3 only where targets have
    it."""
    assert {row["target"] for row in rows if "e4m3" in row["case"]} == {"cuda:90", "cuda:100"}
    assert {row["target"] for row in rows if "int8" in row["case"]} == {"cuda:80", "cuda:90", "cuda:100", "hip:gfx942"}
    for row in (row for row in rows if row["loops"] is not None):
        assert set(row["loops"]["global_loads"]) == {"16"}, row
        assert row["loops"]["shared_byte_loads"] == 0, row
        # docs/kernels.md promises equal bits up to 32 rows and above, so each range uses one instruction.
        is_few = any(f" {count} rows" in row["case"] for count in (16, 32))
        newest = {"cuda:80": "mma", "cuda:90": "wgmma", "cuda:100": "tcgen05"}[row["target"]]
        assert row["loops"]["matrix_kind"] == ("mma" if is_few else newest), row
        if is_few:
            assert row["programs"] >= 3, row


def _check_latents(rows: list[dict[str, Any]]) -> None:
    """Latents are loaded by 16 bytes, beside block ids of four. Two tiles fit: one in use, one being loaded."""
    for row in (row for row in rows if row["loops"] is not None):
        assert set(row["loops"]["global_loads"]) == {"4", "16"}, row
        assert row["loops"]["matrix_kind"] == "mma", row
        assert row["shared_bytes"] >= (2 * 16 + 16) * 576 * 2, row  # latents, and the queries
        assert row["programs"] >= (2 if row["target"] == "cuda:80" else 3), row


def _check_attention(rows: list[dict[str, Any]]) -> None:
    """Keys and values are loaded by 16 bytes and multiplied on tensor cores. Enough programs fit to hide memory
    latency."""
    fp8_targets = {row["target"] for row in rows if "fp8" in row["case"]}
    assert fp8_targets == {"cuda:90", "cuda:100"}
    for row in (row for row in rows if row["loops"] is not None):
        loads = {int(width): count for width, count in row["loops"]["global_loads"].items()}
        # Besides keys and values, a loop loads block ids of four bytes.
        assert set(loads) == {4, 16}, row
        assert row["loops"]["shared_byte_loads"] == 0, row
        is_decode = row["kernel"] == "_decode_split_kernel"
        if not row["case"].startswith("fp32"):
            newest = {"cuda:80": "mma", "cuda:90": "wgmma", "cuda:100": "tcgen05"}[row["target"]]
            # 16 rows, as in decoding or in prompts of large heads, do not fill a tile of the newer instructions.
            is_few = is_decode or "d512" in row["case"]
            assert row["loops"]["matrix_kind"] == ("mma" if is_few else newest), row
            assert row["loops"]["matrix_count"] > 0, row
        if is_decode:
            assert row["programs"] >= (2 if row["target"] == "cuda:80" else 3), row


def _check_boxes(rows: list[dict[str, Any]]) -> None:
    """The unmasked loop loads two boxes instead of keys by 16 bytes, which is half of those loads. The masked loop
    keeps its own."""
    loops = {(row["case"], row["target"]): row["loops"] for row in rows}
    boxes = {key for key in loops if key[0].endswith(" boxes")}
    on_hopper = ("d64 9/3", "d128 32/8", "d256 16/8", "d64 9/3 fp8 pool", "d128 32/8 fp8 pool")
    on_hopper += ("d128 32/16 images", "d256 8/4 images")
    assert boxes == {
        (f"bf16 {case} boxes", target)
        for target in ("cuda:90", "cuda:100")
        for case in on_hopper
        if (case, target) != ("d64 9/3", "cuda:100")
    }
    for case, target in boxes:
        found, by_pointers = loops[case, target], loops[case.removesuffix(" boxes"), target]
        assert found["box_loads"] == 2, (case, target, found)
        assert 2 * found["global_loads"]["16"] == by_pointers["global_loads"]["16"], (case, target, found, by_pointers)
        assert found["matrix_count"] == by_pointers["matrix_count"], (case, target, found, by_pointers)
    assert not any(found["box_loads"] for key, found in loops.items() if key not in boxes and found is not None)


def test_nothing_may_spill_with_the_triton_that_tiles_are_chosen_by() -> None:
    limits = [spill_limit(version) for version in ("3.6.0", "3.8.1", "3.9.0", "3.10.0", "4.0.0+git1")]
    assert limits == [96, 96, 0, 0, 0]


def test_spills_are_seen(environment: dict[str, str]) -> None:
    """With at most 24 registers requested, the kernel spills, and the parsers report the spilled bytes."""
    done = _run(environment, "-c", _SPILLING)
    assert done.returncode == 0, done.stderr
    registers, spill_bytes, broken = json.loads(done.stdout)
    assert registers <= 32
    assert spill_bytes > 0
    assert broken == [f"{spill_bytes} bytes spilled"]


def test_the_interpreter_is_refused(environment: dict[str, str]) -> None:
    done = _run({**environment, "TRITON_INTERPRET": "1"}, "-m", "kvrelay.kernels.compile_check")
    assert done.returncode != 0
    assert "TRITON_INTERPRET is set" in done.stderr
