"""The size of the pool, and options that are refused before anything is loaded."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from kvrelay.common.errors import ModelError
from kvrelay.engine.backends import options as engine_options
from kvrelay.engine.backends.cuda.build import require_attention, require_weight_format
from kvrelay.engine.backends.cuda.memory import GpuMemory
from kvrelay.engine.backends.options import (
    EngineOptions,
    device_of,
    dtype_of,
    keep_compiled,
    kv_dtype_of,
    num_blocks_of,
    rounding_of,
)
from kvrelay.engine.config.model import parse_config
from kvrelay.engine.weights.rounding import Rounding

BLOCK_NBYTES = 1000


def options(**chosen: object) -> EngineOptions:
    return EngineOptions(Path(), "m", **chosen)  # type: ignore[arg-type]


GPU = GpuMemory(total=100_000, free=95_000, held=4_000, step=2_000)


def test_a_gpus_pool_is_what_the_weights_and_a_step_leave_of_its_share() -> None:
    assert num_blocks_of(options(), BLOCK_NBYTES, GPU) == 83  # nine tenths of the free memory, less the step
    assert num_blocks_of(options(kv_memory_fraction=0.3), BLOCK_NBYTES, GPU) == 24
    assert num_blocks_of(options(kv_memory_bytes=42_999), BLOCK_NBYTES, GPU) == 42
    assert num_blocks_of(options(num_blocks=7), BLOCK_NBYTES, GPU) == 7
    expected = (
        r"--kv-memory-fraction 0.05 gives a pool of 0 blocks .* \(the GPU's memory: .*\): raise --kv-memory-fraction"
    )
    with pytest.raises(ModelError, match=expected):
        num_blocks_of(options(kv_memory_fraction=0.05), BLOCK_NBYTES, GPU)


@pytest.mark.parametrize(("kind", "source"), [("num_blocks", "--num-blocks"), ("kv_memory_bytes", "--kv-memory-mb")])
def test_a_pool_of_a_given_size_must_fit_beside_the_largest_step(kind: str, source: str) -> None:
    unit = 1 if kind == "num_blocks" else BLOCK_NBYTES
    # 93 blocks are free beside the step, and one of them is the spare block.
    assert num_blocks_of(options(**{kind: 92 * unit}), BLOCK_NBYTES, GPU) == 92
    expected = rf"^{source} gives a pool of 93 blocks, .* of 512 tokens \(.*\): lower {source} or --max-batched-tokens$"
    with pytest.raises(ModelError, match=expected):
        num_blocks_of(options(**{kind: 93 * unit}), BLOCK_NBYTES, GPU)


def test_without_a_gpu_there_is_a_default() -> None:
    assert num_blocks_of(options(), 2**20, None) == 1024


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelError, match="--device is cuda, but torch finds no GPU"):
        device_of("cuda")
    assert device_of("auto").type == "cpu"


def test_a_cpu_that_lacks_the_checkpoints_type_computes_in_another_unless_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")

    def no_compiler() -> str | None:
        return "there is no g++"

    for has_bf16, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(engine_options, "has_packed_linear", lambda dtype, has=has_bf16: has)
        assert not caplog.text
        assert dtype_of("auto", "bfloat16", cpu, no_compiler) is expected
    assert "no kernels of our own for it (there is no g++): computing in float32, with twice the memory" in caplog.text
    assert dtype_of("auto", "bfloat16", cpu, lambda: None) is torch.bfloat16
    assert dtype_of("auto", "float16", cpu, lambda: None) is torch.float32
    assert dtype_of("auto", "bfloat16", cuda, no_compiler) is torch.bfloat16
    assert dtype_of("bfloat16", "float32", cpu, no_compiler) is torch.bfloat16
    assert dtype_of("float16", "float32", cuda, no_compiler) is torch.float16


def test_weights_are_rounded_where_there_are_kernels_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for device in (cpu, cuda):
        assert rounding_of("full", device, torch.float32) is None
    for dtype in (torch.bfloat16, torch.float16):
        assert rounding_of("int8", cuda, dtype) is Rounding.INT8
        assert rounding_of("fp8", cuda, dtype) is Rounding.FP8
    for name in ("int8", "fp8"):
        with pytest.raises(
            ModelError, match=rf"--weight-format is {name}, which needs --dtype bfloat16 or float16 on a"
        ):
            rounding_of(name, cuda, torch.float32)
    with pytest.raises(ModelError, match="--weight-format is fp8, which needs a GPU, not cpu; take int8"):
        rounding_of("fp8", cpu, torch.bfloat16)
    with pytest.raises(
        ModelError, match=r"which needs --dtype bfloat16 on a CPU, not torch\.float16; leave it at full"
    ):
        rounding_of("int8", cpu, torch.float16)
    monkeypatch.setattr(engine_options, "has_packed_linear", lambda dtype: dtype == torch.bfloat16)
    assert rounding_of("int8", cpu, torch.bfloat16) is Rounding.INT8
    monkeypatch.setattr(engine_options, "has_packed_linear", lambda dtype: False)
    with pytest.raises(ModelError, match="without instructions for bf16, is slower with; leave it at full"):
        rounding_of("int8", cpu, torch.bfloat16)


@pytest.mark.parametrize(("capability", "is_refused"), [((8, 0), True), ((9, 0), False)])
def test_fp8_weights_need_a_gpu_that_has_fp8(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_refused: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cuda = torch.device("cuda")
    require_weight_format(None, cuda)
    require_weight_format(Rounding.INT8, cuda)
    if not is_refused:
        require_weight_format(Rounding.FP8, cuda)
        return
    with pytest.raises(
        ModelError, match=r"--weight-format is fp8, but fp8 \(e4m3\) weights need .* has 8.0; take int8"
    ):
        require_weight_format(Rounding.FP8, cuda)


@pytest.mark.parametrize(("head_dim", "is_taken"), [(64, True), (512, True), (100, False), (528, False)])
def test_a_gpu_names_heads_that_its_kernels_do_not_take(head_dim: int, is_taken: bool) -> None:
    sizes = {"vocab_size": 10, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    places = {"num_attention_heads": 1, "max_position_embeddings": 64, "head_dim": head_dim}
    config = parse_config({"architectures": ["LlamaForCausalLM"], **sizes, **places}, "/m")
    refusal = pytest.raises(ModelError, match=f"head_dim is {head_dim}; .* up to 512: .* --backend transformers")
    with contextlib.nullcontext() if is_taken else refusal:
        require_attention(config)


def test_only_a_gpu_has_a_pool_in_fp8() -> None:
    assert kv_dtype_of("auto", torch.bfloat16, torch.device("cpu")) is torch.bfloat16
    assert kv_dtype_of("fp8", torch.bfloat16, torch.device("cuda")) is torch.float8_e4m3fn
    with pytest.raises(ModelError, match="--kv-dtype is fp8, which needs a GPU"):
        kv_dtype_of("fp8", torch.bfloat16, torch.device("cpu"))


def test_tritons_kernels_are_kept_with_ours_unless_somebody_names_a_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    environment: dict[str, str] = {}
    keep_compiled(environment)
    assert environment == {"TRITON_CACHE_DIR": str(tmp_path / "kvrelay" / "kernels" / "triton")}
    chosen = {"TRITON_CACHE_DIR": "/elsewhere"}
    keep_compiled(chosen)
    assert chosen == {"TRITON_CACHE_DIR": "/elsewhere"}
