"""Calibrated scales: what they are, and what they are good for: the logits over an fp8 pool, by the GPU's operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvrelay.common.errors import ModelError
from kvrelay.engine import ops_cuda, torch_engine
from kvrelay.engine.batch import build_batch
from kvrelay.engine.cuda import cuda_ops
from kvrelay.engine.engine_options import EngineOptions
from kvrelay.engine.interface import StepRow
from kvrelay.engine.kv_calibration import MARGIN, largest_kv, scales_for
from kvrelay.engine.kv_pool import KvPool
from kvrelay.engine.kv_scales import FILE_NAME, load_kv_scales, save_kv_scales
from kvrelay.engine.model import DecoderModel
from kvrelay.engine.model_config import load_config
from kvrelay.engine.weights import checkpoint_files, load_weights
from kvrelay.kernels.activation import silu_mul_reference
from kvrelay.kernels.decode_attention import paged_decode_attention_reference
from kvrelay.kernels.norm import add_rms_norm_reference, rms_norm_reference
from kvrelay.kernels.prefill_attention import paged_prefill_attention_reference
from kvrelay.kernels.rotary import rotary_kv_write_reference
from tests.engine.conftest import SIZES, load, save_model, sequence, tokens
from tests.engine.test_ops_cuda import run_interpreted
from tests.engine.test_torch_engine import run


def options(directory: Path, **more: Any) -> EngineOptions:
    return EngineOptions(directory, "tiny", device="cpu", **more)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_largest_are_those_that_the_engine_stores(dtype: str, llama: tuple[Path, Any]) -> None:
    prompts = [tokens(1, 70), tokens(2, 33), tokens(3, 1)]
    heard: list[tuple[int, int]] = []
    given = largest_kv(
        options(llama[0], dtype=dtype, max_batched_tokens=32), prompts, lambda done, total: heard.append((done, total))
    )
    assert heard == [(32, 104), (64, 104), (70, 104), (102, 104), (103, 104), (104, 104)]
    engine = load(llama[0], dtype=dtype, max_batched_tokens=32)
    rows = [sequence(prompt, list(range(5 * n, 5 * n + 5))) for n, prompt in enumerate(prompts)]
    run(engine, [(row, len(row.token_ids)) for row in rows])
    stored = engine._pool.tensor.abs().amax(dim=(0, 4, 5)).float()
    assert given.shape == stored.shape == (3, 2, 2)
    torch.testing.assert_close(given, stored, rtol=1e-5 if dtype == "float32" else 0.03, atol=0)


def test_scales_are_powers_of_two_with_room_and_never_0() -> None:
    largest = torch.tensor([[448.0, 1e-3], [0.0, 1e-44], [3e38, 57.0]])
    scales = scales_for(largest)
    assert scales.dtype == torch.float32
    assert scales[1, 0] == 1
    assert (scales > 1e-38).all()
    assert scales.isfinite().all()
    assert (scales.frexp().mantissa == 0.5).all()
    room = 448 * scales.double() / largest
    assert (room[largest > 1e-30] >= MARGIN).all()
    assert (room[largest > 1e-30] <= 2 * MARGIN).all()


@pytest.mark.parametrize("broken", ["layers.0.mlp.down_proj", "layers.1.self_attn.k_proj", "layers.2.self_attn.v_proj"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_broken_model_has_no_scales(broken: str, value: float, tmp_path: Path) -> None:
    """The CPU's operations store 0 for what is no number; a NaN that the last layers make reaches nobody's keys, and no matter."""
    save_model(tmp_path, transformers.LlamaConfig(**SIZES))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors[f"model.{broken}.weight"][0, 0] = value
    save_file(tensors, path, metadata={"format": "pt"})
    layer = int(broken.split(".")[1]) + ("mlp" in broken)
    with pytest.raises(ModelError, match=rf"of layer {layer} are no finite numbers in torch.float32"):
        largest_kv(options(tmp_path, dtype="float32"), [tokens(1, 5)], lambda done, total: None)


# What keys and values are multiplied by; queries and attention's output are divided by it, so that the model stays what it is.
FACTORS = {"small": 1e-4, "ordinary": 1.0, "large": 1e3}
CPU = torch.device("cpu")


def scaled_model(directory: Path, seed: int, factor: float) -> None:
    """A random Llama of two layers."""
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 2, "initializer_range": 0.12})
    save_model(directory, config)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(seed)
    by = {"k_proj": factor, "v_proj": factor, "q_proj": 1 / factor, "o_proj": 1 / factor}
    for name, tensor in tensors.items():
        if "norm" not in name:
            tensor.normal_(0, 0.12, generator=generator).mul_(by.get(name.split(".")[-2], 1.0))
    save_file(tensors, path, metadata={"format": "pt"})


def calibrate(directory: Path, seed: int) -> None:
    """On other tokens than the errors are taken of."""
    prompts = [tokens(100 + seed, 60), tokens(200 + seed, 60)]
    save_kv_scales(directory / FILE_NAME, scales_for(largest_kv(options(directory), prompts, lambda done, total: None)))


def logits(directory: Path, token_ids: list[int], dtype: torch.dtype, kv_scales: torch.Tensor | None) -> torch.Tensor:
    """Of every token, by the GPU's operations: most in a prompt's step, the last two in one of their own each."""
    config = load_config(directory)
    weights = load_weights(directory, config, torch.float32, CPU, lambda done, total: None)
    pool = KvPool(config, 4, 16, dtype, CPU)
    ops = cuda_ops(config, pool, 64, options(directory, max_num_seqs=2), kv_scales)
    model = DecoderModel(config, weights, ops)
    row = sequence(token_ids, [2, 0, 3, 1])
    all_logits = []
    with torch.inference_mode():
        for count in (len(token_ids) - 2, 1, 1):
            batch = build_batch([StepRow(row, count)], 16)
            all_logits.append(model.logits(model.forward(ops.upload((batch.token_ids,))[0], ops.begin_step(batch))))
            row.num_computed_tokens += count
    return torch.cat(all_logits)


def errors(directory: Path, token_ids: list[int]) -> tuple[float, float]:
    """Of the logits over fp8 pools with the model's scales and with 1, relative to those over a pool in fp32."""
    scales = load_kv_scales(directory, checkpoint_files(directory), load_config(directory))
    exact = logits(directory, token_ids, torch.float32, None)
    ours, unit = (
        float((logits(directory, token_ids, torch.float8_e4m3fn, each) - exact).norm() / exact.norm())
        for each in (scales, torch.ones_like(scales))
    )
    return ours, unit


@pytest.fixture
def _reference_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' references in their place: seconds, where the interpreter takes minutes."""

    def decode(*tensors: torch.Tensor, workspace: object, **more: Any) -> None:
        paged_decode_attention_reference(*tensors, **more)

    monkeypatch.setattr(ops_cuda, "rotary_kv_write", rotary_kv_write_reference)
    monkeypatch.setattr(ops_cuda, "paged_prefill_attention", paged_prefill_attention_reference)
    monkeypatch.setattr(ops_cuda, "paged_decode_attention", decode)
    monkeypatch.setattr(ops_cuda, "rms_norm", rms_norm_reference)
    monkeypatch.setattr(ops_cuda, "add_rms_norm", add_rms_norm_reference)
    monkeypatch.setattr(ops_cuda, "silu_mul", silu_mul_reference)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.usefixtures("_reference_kernels")
def test_calibrated_scales_keep_the_logits_where_scales_of_1_do_not(seed: int, tmp_path: Path) -> None:
    of: dict[str, tuple[float, float]] = {}
    for name, factor in FACTORS.items():
        scaled_model(tmp_path / name, seed, factor)
        calibrate(tmp_path / name, seed)
        of[name] = errors(tmp_path / name, tokens(seed, 60))
    for name in ("small", "large"):
        calibrated, unit = of[name]
        assert 0 < calibrated < 0.25 * unit, of
    calibrated, unit = of["ordinary"]
    assert 0 < calibrated < 1.1 * unit, of
    assert calibrated < 0.1, of


INTERPRETED = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[2])
from tests.engine.conftest import tokens
from tests.engine.test_kv_calibration import errors

for name in ("small", "large"):
    calibrated, unit = errors(Path(sys.argv[1]) / name, tokens(0, 10))
    assert 0 < calibrated < 0.25 * unit, (name, calibrated, unit)
    print("near", name, calibrated, unit)
"""


@pytest.mark.full
def test_so_do_the_kernels_themselves(tmp_path: Path) -> None:
    for name in ("small", "large"):
        scaled_model(tmp_path / name, 0, FACTORS[name])
        calibrate(tmp_path / name, 0)
    assert run_interpreted(INTERPRETED, tmp_path, str(Path(__file__).parents[2])).count("near") == 2


@pytest.mark.usefixtures("_reference_kernels")
def test_an_engine_takes_the_scales_and_tells_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but for the device: same file, same fingerprint; a scale's last bit, another one."""
    scaled_model(tmp_path, 0, 1e3)
    taken: list[torch.Tensor | None] = []

    def load_and_note(*about: Any) -> torch.Tensor:
        taken.append(load_kv_scales(*about))
        return taken[-1]

    def on_the_cpu(options: EngineOptions, config: Any, pool: torch.Tensor, *more: Any, **_: Any) -> ops_cuda.CudaOps:
        return ops_cuda.CudaOps(config, pool, *more, options.max_num_seqs, taken[-1])

    monkeypatch.setattr(torch_engine, "kv_dtype_of", lambda *about: torch.float8_e4m3fn)
    monkeypatch.setattr(torch_engine, "load_kv_scales", load_and_note)
    monkeypatch.setattr(torch_engine, "cpu_ops", on_the_cpu)
    unit = load(tmp_path).card.layout
    assert (unit.kv_dtype, unit.kv_scales) == ("float8_e4m3fn", "")
    calibrate(tmp_path, 0)
    engine, twin = load(tmp_path), load(tmp_path)
    assert engine.card.layout.fingerprint() == twin.card.layout.fingerprint() != unit.fingerprint()
    row = sequence(tokens(0, 40), [0, 1, 2])
    run(engine, [(row, 40)])
    # With room on top, but not without bounds: the scales were used.
    assert 448 / (4 * MARGIN) < engine._pool.tensor.float().abs().max() < 448
    scales = taken[-1]
    assert scales is not None
    scales[1, 0, 1] *= 1 + 2**-23
    save_kv_scales(tmp_path / FILE_NAME, scales)
    other = load(tmp_path).card.layout
    assert other.fingerprint() != engine.card.layout.fingerprint()
    assert "other K/V scales" in engine.card.layout.differences(other)[0]
