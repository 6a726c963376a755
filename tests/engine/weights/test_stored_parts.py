"""Parts of stored weights equal parts of the whole, little else is read, and ranks keep their parts as stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file

from kvrelay.engine.backends.cuda.linear import StoredLinear
from kvrelay.engine.config.cut import Cut
from kvrelay.engine.config.quantisation import Quantisation
from kvrelay.engine.weights import checkpoint
from kvrelay.engine.weights.headers import read_headers
from kvrelay.engine.weights.parameters import ModelWeights
from kvrelay.engine.weights.reader import CheckpointReader
from kvrelay.engine.weights.stored import StoredWeight
from tests.engine.weights.storing import Tensors, awq, gptq, integers

from .stored_models import FORMATS, HALF, load_stored, save_gpt_oss, save_in_format, save_llama, save_mixtral
from .test_formats import SCHEMES, compressed, matrix

OTHERS = ("gptq", "gptq in the order of activations", "gptq of 8 bits", "awq", "mxfp4")
# Of 48 outputs and 160 inputs, in groups of 32: parts that end inside words, groups and blocks, and the whole.
PARTS = (
    (range(16, 32), range(160)),
    (range(48), range(64, 128)),
    (range(8, 32), range(32, 160)),
    (range(48), range(2, 38)),
    (range(3, 17), range(48, 112)),
    (range(48), range(160)),
    (range(1, 2), range(64, 72)),
    (range(48), range(96, 160)),
    (range(16, 48), range(33, 160)),
)


def save(case: str, directory: Path) -> Quantisation:
    """Save a matrix ``m``, or three experts in one tensor, in a format. Scales and zeros differ everywhere."""
    if case == "mxfp4":
        generator = torch.Generator().manual_seed(3)
        blocks = torch.randint(0, 256, (3, 48, 5, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(110, 140, (3, 48, 5), generator=generator).to(torch.uint8)
        save_file({"m.weight_blocks": blocks, "m.weight_scales": scales}, directory / "model.safetensors")
        return Quantisation("mxfp4")
    if case in SCHEMES:
        tensors, quantisation, _ = compressed(case, torch.bfloat16)
    else:
        bits = 8 if "8" in case else 4
        ints = integers(matrix(), bits, 32, symmetric=False, shuffled="order" in case)
        tensors, quantisation = (
            (awq(ints), Quantisation("awq")) if case == "awq" else (gptq(ints, bits), Quantisation("gptq", None, 1))
        )
    held = {f"m.{key}": tensor.contiguous() for key, tensor in tensors.items()}
    save_file(held, directory / "model.safetensors")
    return quantisation


@pytest.mark.parametrize("case", [*SCHEMES, *OTHERS])
def test_a_part_is_that_of_the_whole_and_little_else_is_read(case: str, tmp_path: Path) -> None:
    quantisation, num_bytes = save(case, tmp_path), []
    with CheckpointReader(read_headers(tmp_path), quantisation, torch.bfloat16) as reader:
        whole = reader.read("m.weight")
        for rows, columns in PARTS:
            part = (range(1, 3), columns, rows) if case == "mxfp4" else (rows, columns)
            wanted, before = whole[tuple(slice(one.start, one.stop) for one in part)], reader.num_bytes_read
            assert torch.equal(reader.part("m.weight", part), wanted), part
            num_bytes.append(reader.num_bytes_read - before)
            if (len(columns) < 160 and "order" in case) or columns.start % 2:
                continue  # no such part can be stored
            stored = reader.stored("m.weight", part)
            full = stored.dequantised()
            assert torch.equal(full, wanted.transpose(1, 2).flatten(0, 1) if case == "mxfp4" else wanted), part
    all_bytes = num_bytes[PARTS.index((range(48), range(160)))]
    assert num_bytes[0] < 0.7 * all_bytes
    if "order" not in case and case != "w8a16":  # its groups of 80 are both needed
        assert num_bytes[1] < 0.7 * all_bytes


@pytest.mark.parametrize(
    ("shape", "group_size", "symmetric"),
    [((48, 20), 20, True), ((48, 12), 12, True), ((12, 160), 32, False), ((20, 160), 32, False)],
)
def test_parts_of_numbers_that_do_not_fill_their_last_word(
    shape: tuple[int, int], group_size: int, symmetric: bool, tmp_path: Path
) -> None:
    """Words of eight numbers along the inputs and, for zeros, along the outputs."""
    args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=group_size, symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    ints = integers(matrix(*shape), 4, group_size, symmetric=symmetric)
    tensors = {"weight": ints.full(), "weight_scale": ints.scale.float()}
    if not symmetric:
        tensors["weight_zero_point"] = (ints.zero - 8).to(torch.int8)
    stored = PackedQuantizationCompressor.compress(tensors, scheme)
    save_file({f"m.{name}": one.contiguous() for name, one in stored.items()}, tmp_path / "model.safetensors")
    with CheckpointReader(read_headers(tmp_path), Quantisation("compressed-tensors"), torch.float32) as reader:
        whole = reader.read("m.weight")
        torch.testing.assert_close(whole, ints.full())
        halves = [(range(size // 2), range(size // 2, size)) for size in shape]
        for rows in halves[0]:
            for columns in halves[1]:
                part = whole[rows.start : rows.stop, columns.start : columns.stop]
                assert torch.equal(reader.part("m.weight", (rows, columns)), part)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_llama(directory)
    return directory


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixtral")
    save_mixtral(directory)
    return directory


def matrices(weights: ModelWeights) -> dict[str, Any]:
    """The weights of the layer's products."""
    (layer,) = weights.layers
    mlp: Any = getattr(layer.mlp, "experts", layer.mlp)
    attention: Any = layer.attention
    return {"qkv": attention.qkv, "o": attention.o, "gate_up": mlp.gate_up, "down": mlp.down}


@pytest.mark.parametrize("name", FORMATS)
def test_ranks_keep_their_parts_as_they_are_stored(name: str, llama: Path, tmp_path: Path) -> None:
    """Stored parts have the values of parts of full weights, and the products of the ranks add up to the whole
    product."""
    save_in_format(llama, tmp_path, name)
    generator, products = torch.Generator().manual_seed(4), {"o": torch.zeros(3, 64), "down": torch.zeros(3, 64)}
    inputs = {"o": torch.randn(3, 128, generator=generator), "down": torch.randn(3, 192, generator=generator)}
    sizes: dict[str, list[int]] = {"o": [], "down": []}
    for rank in range(2):
        ours, full = (matrices(load_stored(tmp_path, Cut(rank, 2), keeps=keeps)) for keeps in (True, False))
        for projection, weight in ours.items():
            is_cut_by_inputs = projection in ("o", "down")
            if name == "gptq-act-order" and is_cut_by_inputs:
                assert torch.equal(weight, full[projection])  # reordered inputs cannot be cut
                continue
            assert isinstance(weight, StoredWeight), projection
            assert torch.equal(weight.dequantised(), full[projection]), projection
            if is_cut_by_inputs:
                start = sum(sizes[projection])
                sizes[projection].append(weight.shape[1])
                part = inputs[projection][:, start : start + weight.shape[1]].to(HALF)
                products[projection] += StoredLinear(weight, None, num_multiprocessors=16)(part)
        if name == "awq by 96":
            assert (ours["o"].group_size, ours["down"].group_size) == (64, (64, 32)[rank])
    if name != "gptq-act-order":
        for projection, weight in matrices(load_stored(tmp_path, Cut(), keeps=False)).items():
            if projection in products:
                wanted = inputs[projection].to(HALF).float() @ weight.float().T
                torch.testing.assert_close(products[projection], wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("has_whole_experts", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_experts_stay_as_they_are_stored(name: str, has_whole_experts: bool, mixtral: Path, tmp_path: Path) -> None:
    save_in_format(mixtral, tmp_path, name)
    for cut in (Cut(), Cut(0, 2, has_whole_experts), Cut(1, 2, has_whole_experts)):
        ours, full = (matrices(load_stored(tmp_path, cut, keeps=keeps)) for keeps in (True, False))
        for projection in ("gate_up", "down"):
            weight, wanted = ours[projection], full[projection]
            if name == "gptq-act-order":
                assert torch.equal(weight, wanted)  # each expert has an order of its own
            else:
                assert isinstance(weight, StoredWeight)
                assert torch.equal(weight.dequantised(), wanted)


@pytest.mark.parametrize("has_whole_experts", [False, True])
def test_experts_in_mxfp4_stay_as_they_are_stored(has_whole_experts: bool, tmp_path: Path) -> None:
    save_gpt_oss(tmp_path)
    for cut in (Cut(), Cut(0, 2, has_whole_experts), Cut(1, 2, has_whole_experts)):
        ours, full = (matrices(load_stored(tmp_path, cut, keeps=keeps)) for keeps in (True, False))
        for projection in ("gate_up", "down"):
            weight = ours[projection]
            assert isinstance(weight, StoredWeight)
            assert weight.is_mxfp4
            assert torch.equal(weight.dequantised(), full[projection])
        assert isinstance(ours["qkv"], torch.Tensor)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_rank_reads_its_part_of_stored_weights(
    keeps: bool, mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank with half the columns of all experts, or half of the experts, reads about half of the bytes."""
    readers: list[CheckpointReader] = []

    class Watched(CheckpointReader):
        def __enter__(self) -> Any:
            readers.append(self)
            return super().__enter__()

    save_in_format(mixtral, tmp_path, "awq")
    monkeypatch.setattr(checkpoint, "CheckpointReader", Watched)
    for cut in (Cut(), Cut(1, 2), Cut(1, 2, has_whole_experts=True)):
        load_stored(tmp_path, cut, keeps=keeps)
    whole, *halves = (reader.num_bytes_read for reader in readers)
    for half in halves:
        assert 0.45 * whole < half < 0.6 * whole


def test_matrices_of_a_form_share_an_outline_and_only_their_numbers_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mixture has ten thousands of matrices. What order inputs are in is found for each."""
    held: Tensors = {}
    for module, shuffled in (("a", False), ("b", True), ("c", False), ("d", False)):
        ints = integers(matrix(), 4, 32, symmetric=False, shuffled=shuffled)
        held |= {f"{module}.{name}": tensor.contiguous() for name, tensor in gptq(ints, 4).items()}
    save_file(held, tmp_path / "model.safetensors")
    opened: list[str] = []
    outline = CheckpointReader._outline

    def counted(reader: CheckpointReader, tensor: str) -> torch.Tensor:
        opened.append(tensor)
        return outline(reader, tensor)

    monkeypatch.setattr(CheckpointReader, "_outline", counted)
    with CheckpointReader(read_headers(tmp_path), Quantisation("gptq", None, 1), torch.bfloat16) as reader:
        first, shuffled_one, *same = (reader.outlines[f"{module}.weight"] for module in "abcd")
    assert first.order is None
    assert shuffled_one.order is not None
    assert all(one is first for one in same)
    assert {name for name in opened if name[0] in "cd"} == {"c.g_idx", "d.g_idx"}
