"""Stored weights, tensor by tensor: values equal compressed-tensors', transformers', or the format's description."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.quantisation import Quantisation
from kvrelay.engine.weights import stored as module
from kvrelay.engine.weights.formats import mxfp4_weight
from kvrelay.engine.weights.headers import TensorHeader, read_headers
from kvrelay.engine.weights.reader import CheckpointReader
from kvrelay.kernels.linear.group_scaled import dequantise_groups_reference
from tests.engine.weights.storing import Tensors, awq, gptq, integers, words

_GENERATOR = torch.Generator().manual_seed(4)


def matrix(num_outs: int = 48, num_ins: int = 160) -> torch.Tensor:
    """A matrix whose rows differ in size."""
    return torch.randn(num_outs, num_ins, generator=_GENERATOR) * torch.logspace(-2, 1, num_outs)[:, None]


class Read:
    """Reads the only module ``m`` of a checkpoint. Raises ModelError."""

    def __init__(self, directory: Path, tensors: Tensors, quantisation: Quantisation) -> None:
        save_file(
            {f"m.{name}": tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors"
        )
        self._headers = read_headers(directory)
        self._quantisation = quantisation

    def header(self) -> TensorHeader:
        """The header of its weight, without reading any bytes."""
        with self._reader(torch.float32) as reader:
            (header,) = reader.headers.values()
            assert reader.headers.keys() == {"m.weight"}
            assert reader.num_bytes_read == 0
            return header

    def full(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with self._reader(dtype) as reader:
            weight = reader.read("m.weight")
            assert tuple(weight.shape) == reader.headers["m.weight"].shape
            return weight

    def part(self, part: tuple[range, range]) -> torch.Tensor:
        with self._reader(torch.float32) as reader:
            return reader.part("m.weight", part)

    def _reader(self, dtype: torch.dtype) -> CheckpointReader:
        return CheckpointReader(self._headers, self._quantisation, dtype)


COMPRESSED = Quantisation("compressed-tensors")
INT4 = {"num_bits": 4, "type": "int"}
INT8 = {"num_bits": 8, "type": "int"}
FP8 = {"num_bits": 8, "type": "float"}
# (the library's compressor, its arguments, the shape of the scales)
SCHEMES: dict[str, tuple[Any, dict[str, Any], tuple[int, ...]]] = {
    "w4a16": (PackedQuantizationCompressor, {**INT4, "strategy": "group", "group_size": 32}, (48, 5)),
    "w4a16, asymmetric": (
        PackedQuantizationCompressor,
        {**INT4, "strategy": "group", "group_size": 32, "symmetric": False},
        (48, 5),
    ),
    "w4a16, channels": (PackedQuantizationCompressor, {**INT4, "strategy": "channel"}, (48, 1)),
    "w8a16": (PackedQuantizationCompressor, {**INT8, "strategy": "group", "group_size": 80}, (48, 2)),
    "w8a16, asymmetric": (
        PackedQuantizationCompressor,
        {**INT8, "strategy": "channel", "symmetric": False},
        (48, 1),
    ),
    "w8a8": (IntQuantizationCompressor, {**INT8, "strategy": "channel"}, (48, 1)),
    "w8a8, asymmetric": (IntQuantizationCompressor, {**INT8, "strategy": "channel", "symmetric": False}, (48, 1)),
    "w8a8, tensor": (IntQuantizationCompressor, {**INT8, "strategy": "tensor"}, (1,)),
    "w8a8, tensor, asymmetric": (IntQuantizationCompressor, {**INT8, "strategy": "tensor", "symmetric": False}, (1,)),
    "fp8": (FloatQuantizationCompressor, {**FP8, "strategy": "tensor"}, (1,)),
    "fp8, channels": (FloatQuantizationCompressor, {**FP8, "strategy": "channel"}, (48, 1)),
    "fp8, blocks": (FloatQuantizationCompressor, {**FP8, "strategy": "block", "block_structure": [32, 64]}, (2, 3)),
}


def compressed(case: str, dtype: torch.dtype) -> tuple[Tensors, Quantisation, torch.Tensor]:
    """A matrix in one of the ``SCHEMES``, and the matrix that the library decompresses from it."""
    compressor, given, scale_shape = SCHEMES[case]
    args = QuantizationArgs(**given)
    weight, largest = matrix().to(dtype), 448.0 if args.type == "float" else 2.0 ** (args.num_bits - 1)
    scale = (torch.rand(scale_shape, generator=_GENERATOR) + 0.5).mul(weight.float().std() * 3 / largest).to(dtype)
    tensors = {"weight": weight, "weight_scale": scale}
    if not args.symmetric:
        low, high = (-8, 7) if args.num_bits == 4 else (-100, 100)
        tensors["weight_zero_point"] = torch.randint(low, high + 1, scale_shape, generator=_GENERATOR).to(torch.int8)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    stored = compressor.compress(dict(tensors), scheme)
    block_size = (32, 64) if args.strategy == "block" else None
    full = compressor.decompress(dict(stored), scheme)["weight"]
    return stored, Quantisation("compressed-tensors", block_size), full


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", SCHEMES)
def test_compressed_tensors_are_what_its_library_makes_of_them(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    stored, quantisation, theirs = compressed(case, dtype)
    read = Read(tmp_path, stored, quantisation)
    assert read.header().shape == theirs.shape == (48, 160)
    assert torch.equal(read.full(dtype), theirs)


def test_zeros_of_4_bits_that_are_not_packed(tmp_path: Path) -> None:
    """Older versions of compressed-tensors stored zeros without packing them."""
    args = QuantizationArgs(**INT4, strategy="group", group_size=32, symmetric=False)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    zero = torch.randint(-8, 8, (48, 5), generator=_GENERATOR).to(torch.int8)
    stored = PackedQuantizationCompressor.compress(
        {"weight": matrix(), "weight_scale": torch.rand(48, 5), "weight_zero_point": zero}, scheme
    )
    packed = Read(tmp_path, stored, COMPRESSED).full()
    assert torch.equal(Read(tmp_path, {**stored, "weight_zero_point": zero}, COMPRESSED).full(), packed)


@pytest.mark.parametrize("shuffled", [True, False])
def test_compressed_tensors_in_the_order_of_activations(shuffled: bool, tmp_path: Path) -> None:
    """Older versions of compressed-tensors stored a group index for each input, or -1 without an order."""
    weight = integers(matrix(), 4, 32, symmetric=True, shuffled=shuffled)
    stored = {
        "weight_packed": words(weight.values, 4),
        "weight_scale": weight.scale,
        "weight_shape": torch.tensor(weight.values.shape),
        "weight_g_idx": weight.groups.int() if shuffled else torch.full((160,), -1, dtype=torch.int32),
    }
    assert torch.equal(Read(tmp_path, stored, COMPRESSED).full(), weight.full())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize("zero_offset", [0, 1])
def test_gptq(bits: int, symmetric: bool, shuffled: bool, zero_offset: int, tmp_path: Path) -> None:
    weight = integers(matrix(), bits, 32, symmetric=symmetric, shuffled=shuffled)
    weight.zero[5, 1] = 0  # stored as the largest number by formats that store a zero less one
    read = Read(tmp_path, gptq(weight, bits, zero_offset=zero_offset), Quantisation("gptq", zero_offset=zero_offset))
    assert torch.equal(read.full(), weight.full())


@pytest.mark.parametrize("symmetric", [True, False])
def test_awq(symmetric: bool, tmp_path: Path) -> None:
    weight = integers(matrix(), 4, 32, symmetric=symmetric)
    assert torch.equal(Read(tmp_path, awq(weight), Quantisation("awq")).full(), weight.full())


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_scale"])
# The last two have as many blocks as outputs.
@pytest.mark.parametrize("shape", [(256, 384), (200, 300), (96, 128), (128, 16384), (100, 12800)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_in_blocks(suffix: str, shape: tuple[int, int], kind: torch.dtype, tmp_path: Path) -> None:
    values = matrix(*shape).to(torch.float8_e4m3fn)
    blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
    scale = (torch.rand(blocks, generator=_GENERATOR) + 0.1).to(kind)
    wanted = values.float()
    for row in range(blocks[0]):
        for column in range(blocks[1]):
            block = wanted[128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)]
            block *= scale[row, column].float()
    given = {"weight": values, suffix: scale, "input_scale": torch.tensor(1.0)}
    read = Read(tmp_path, given, Quantisation("fp8", (128, 128)))
    assert torch.equal(read.full(), wanted)
    assert read.header().shape == shape


@pytest.mark.parametrize("shape", [(), (1,), (48,), (48, 1)])
def test_modelopts_fp8(shape: tuple[int, ...], tmp_path: Path) -> None:
    values, scale = matrix().to(torch.float8_e4m3fn), torch.rand(shape, generator=_GENERATOR) + 0.1
    read = Read(tmp_path, {"weight": values, "weight_scale": scale}, Quantisation("modelopt"))
    assert torch.equal(read.full(), values.float() * (scale.reshape(-1, 1) if shape else scale))


@pytest.mark.parametrize("blocks", [(2, 3), (1, 3), (2, 1), (1, 1)])
def test_modelopts_blocks_have_four_dimensions(blocks: tuple[int, int], tmp_path: Path) -> None:
    values = matrix(128 * blocks[0], 128 * blocks[1]).to(torch.float8_e4m3fn)
    scale = torch.rand(blocks[0], 1, blocks[1], 1, generator=_GENERATOR) + 0.1
    read = Read(tmp_path, {"weight": values, "weight_scale": scale}, Quantisation("modelopt", (128, 128)))
    wanted = values.float() * scale[:, 0, :, 0].repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
    assert torch.equal(read.full(), wanted)


def test_mxfp4(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = torch.randint(0, 256, (3, 64, 2, 16), generator=_GENERATOR).to(torch.uint8)
    scales = torch.randint(110, 140, (3, 64, 2), generator=_GENERATOR).to(torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)  # [experts, in, out]
    weight = mxfp4_weight(blocks, scales, torch.bfloat16)  # [experts * out, in]
    assert torch.equal(weight.dequantised().view(3, 64, 64).transpose(1, 2), theirs)
    by_kernels = dequantise_groups_reference(weight.values, weight.scale, weight.zero, 32, torch.bfloat16)
    assert torch.equal(weight.dequantised(), by_kernels)
    monkeypatch.setattr(module, "_MAX_ELEMENTS", 1000)
    assert torch.equal(weight.dequantised().view(3, 64, 64).transpose(1, 2), theirs)


def test_fp4(tmp_path: Path) -> None:
    """DeepSeek-V4's experts have the numbers of MXFP4 under names of fp8."""
    blocks = torch.randint(0, 256, (1, 48, 4, 16), generator=_GENERATOR).to(torch.uint8)
    scales = torch.randint(110, 140, (1, 48, 4), generator=_GENERATOR).to(torch.uint8)
    wanted = mxfp4_weight(blocks, scales, torch.float32).dequantised()
    given = {"weight": blocks.view(48, 64).view(torch.int8), "scale": scales[0].view(torch.float8_e8m0fnu)}
    read = Read(tmp_path, given, Quantisation("fp8", (128, 128)))
    assert read.header().shape == (48, 128)
    assert torch.equal(read.full(), wanted)
    assert torch.equal(read.part((range(5, 40), range(64, 128))), wanted[5:40, 64:])


def test_parts_of_a_matrix_are_dequantised_as_the_whole_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Read(tmp_path, awq(integers(matrix(), 4, 32, symmetric=False)), Quantisation("awq"))
    whole = read.full()
    monkeypatch.setattr(module, "_MAX_ELEMENTS", 3 * 160 + 1)
    assert torch.equal(read.full(), whole)


def broken() -> dict[str, tuple[Tensors, Quantisation, str]]:
    """Tensors that do not fit together, with the expected error."""
    ints = integers(matrix(), 4, 32, symmetric=True)
    of_gptq, of_awq, method = gptq(ints, 4), awq(ints), Quantisation("gptq", zero_offset=1)
    fp8 = matrix().to(torch.float8_e4m3fn)
    packed = {
        "weight_packed": torch.zeros(48, 20, dtype=torch.int32),
        "weight_scale": torch.ones(48, 5),
        "weight_shape": torch.tensor([48, 160]),
    }
    return {
        "no scales": ({"qweight": of_gptq["qweight"], "qzeros": of_gptq["qzeros"]}, method, "there is no 'scales'"),
        "scales of fewer outputs": (
            {**of_gptq, "scales": torch.ones(5, 40)},
            method,
            r"scales \[5, 40\] do not fit together",
        ),
        "other zeros": ({**of_awq, "qzeros": of_awq["qzeros"][:4]}, Quantisation("awq"), r"qzeros \[4, 6\]"),
        "a group that is not there": (
            {**of_gptq, "g_idx": of_gptq["g_idx"] + 1},
            method,
            r"g_idx \[160\] does not put 160 inputs into groups of 32",
        ),
        "groups of unequal size": (
            {**packed, "weight_scale": torch.ones(48, 3)},
            COMPRESSED,
            "into 3 groups of one size",
        ),
        "5 bits": (
            {**packed, "weight_packed": torch.zeros(48, 25, dtype=torch.int32)},
            COMPRESSED,
            r"is \[48, 25\] words for 48 x 160 numbers",
        ),
        "words of 64 bits": (
            {**packed, "weight_packed": torch.zeros(48, 20, dtype=torch.int64)},
            COMPRESSED,
            "words are torch.int64",
        ),
        "full weights with scales": (
            {"weight": matrix(), "weight_scale": torch.ones(48, 1)},
            COMPRESSED,
            r"is torch.float32 \[48, 160\]; beside a scale",
        ),
        "zeros of fewer outputs": (
            {"weight": fp8.view(torch.int8), "weight_scale": torch.ones(48, 1), "weight_zero_point": torch.zeros(5)},
            COMPRESSED,
            r"zeros are \[5\], its scales \[48, 1\]",
        ),
        "blocks of another size": (
            {"weight": fp8, "weight_scale_inv": torch.ones(3, 5)},
            Quantisation("fp8", (128, 128)),
            r"scale is \[3, 5\], which does not fit \[48, 160\] in blocks of \(128, 128\)",
        ),
        "4 bits with scales of blocks": (
            {"weight": fp8.view(torch.int8), "scale": torch.ones(1, 2).to(torch.float8_e8m0fnu)},
            Quantisation("fp8", (128, 128)),
            r"is int8 \[48, 160\] with scales torch.float8_e8m0fnu \[1, 2\]",
        ),
    }


@pytest.mark.parametrize("case", broken())
def test_tensors_that_do_not_fit_are_refused_by_name(case: str, tmp_path: Path) -> None:
    tensors, quantisation, words = broken()[case]
    with pytest.raises(ModelError, match=rf"model\.safetensors: m\.weight .*{words}"):
        Read(tmp_path, tensors, quantisation).header()


def test_blocks_that_are_no_mxfp4(tmp_path: Path) -> None:
    blocks, scales = torch.zeros(2, 4, 8, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.uint8)
    save_file({"m_blocks": blocks, "m_scales": scales}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"m cannot be read as it is stored: blocks .*\[2, 4, 8\].* are no MXFP4"):
        CheckpointReader(read_headers(tmp_path), Quantisation("mxfp4"), torch.float32)
