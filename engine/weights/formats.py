"""How checkpoints store weights of 4 or 8 bits, all converted into one form (:mod:`kvrelay.engine.weights.stored`).

Nothing is rounded: a :class:`StoredWeight` holds the checkpoint's own integers, zeros and scales. The reader decides which format a
module has (:mod:`kvrelay.engine.weights.reader`). Every function raises ValueError on shapes that do not fit.

Sources: GPTQ as packed by AutoGPTQ, AWQ as packed by AutoAWQ's ``gemm``, compressed-tensors' ``pack-quantized``, and the Open
Compute Project's Microscaling Formats for MXFP4, with blocks stored as in gpt-oss or as in DeepSeek-V4.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvrelay.engine.weights.stored import StoredWeight, halves

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # position of each output in a word of 8
_SIGN = 0x80  # XOR with it converts a byte stored with 128 added to an int8

Parts = Mapping[str, torch.Tensor]
"""A module's tensors, by the last part of their names."""


def scaled_weight(parts: Parts, block_size: tuple[int, int] | None, dtype: torch.dtype) -> StoredWeight:
    """int8 or e4m3 with a scale for the tensor, for each output, each group, or each block of ``block_size`` (outputs, inputs).

    Or experts ``[experts, out, in]`` with a scale for each of them, as in Mistral 4. The result stacks the matrices.
    """
    weight, scale = parts["weight"], parts.get("weight_scale", parts.get("weight_scale_inv"))
    if weight.dim() == 3 and scale is not None and scale.numel() == len(weight):
        scale = scale.reshape(-1, 1).repeat_interleave(weight.shape[1], dim=0)
        weight = weight.flatten(0, 1)
    if weight.dim() != 2 or scale is None or weight.dtype not in (torch.int8, torch.float8_e4m3fn):
        raise ValueError(
            f"it is {weight.dtype} {list(weight.shape)}; beside a scale, matrices of int8 and float8_e4m3fn are read"
        )
    num_outs, num_ins = weight.shape
    if scale.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        scale = scale.float()  # e8m0
    if scale.dim() == 4:
        scale = scale.flatten(2).flatten(0, 1)  # ModelOpt's [out blocks, 1, in blocks, 1]
    group_size = num_ins
    # Blocks are checked first: there may be as many blocks as outputs.
    if block_size is not None and scale.shape == (-(-num_outs // block_size[0]), -(-num_ins // block_size[1])):
        group_size = block_size[1]
        scale = scale.repeat_interleave(block_size[0], dim=0)[:num_outs]
    elif scale.numel() == 1:
        scale = scale.reshape(1, 1).expand(num_outs, 1)
    elif scale.numel() == num_outs:
        scale = scale.reshape(num_outs, 1)
    elif scale.dim() == 2 and scale.shape[0] == num_outs:
        group_size = _group_size(num_ins, scale.shape[1])
    else:
        raise ValueError(
            f"its scale is {list(scale.shape)}, which does not fit {list(weight.shape)} in blocks of {block_size}"
        )
    zero = parts.get("weight_zero_point")
    if zero is not None:
        if zero.numel() not in (1, scale.numel()):
            raise ValueError(f"its zeros are {list(zero.shape)}, its scales {list(scale.shape)}")
        zero = zero.reshape(1, 1).expand(scale.shape) if zero.numel() == 1 else zero.reshape(scale.shape)
    return StoredWeight(weight, scale, zero, group_size, order=None, dtype=dtype)


def packed_weight(parts: Parts, dtype: torch.dtype) -> StoredWeight:
    """compressed-tensors' ``pack-quantized``: integers of 4 or 8 bits in 32-bit words, each with half its range added."""
    packed, scale = parts["weight_packed"], parts["weight_scale"]
    num_outs, num_ins = parts["weight_shape"].tolist()
    words = {4: -(-num_ins // 8), 8: -(-num_ins // 4)}
    bits = next((bits for bits, count in words.items() if packed.shape == (num_outs, count)), None)
    if bits is None or num_ins % 2:
        raise ValueError(
            f"it is {list(packed.shape)} words for {num_outs} x {num_ins} numbers; of 4 and 8 bits each, and an even number of "
            "inputs, it can be read"
        )
    scale = scale.reshape(num_outs, -1)
    zero = parts.get("weight_zero_point")
    if zero is not None and zero.dtype == torch.int32:
        zero = _unpacked(zero.T, bits)[:, :num_outs].T
    elif zero is not None:
        zero = (zero + 8).to(torch.uint8) if bits == 4 else zero
    groups = parts.get("weight_g_idx")
    if groups is not None and bool((groups < 0).any()):
        groups = None  # it was never set: the inputs are in order
    return _integers(_bytes(packed)[:, : num_ins * bits // 8], scale, zero, groups, bits, dtype)


def gptq_weight(parts: Parts, zero_offset: int, dtype: torch.dtype) -> StoredWeight:
    """GPTQ: words along the inputs, zeros along the outputs. ``zero_offset``: number to add to the stored zeros."""
    qweight, scale = parts["qweight"], parts["scales"]
    num_groups, num_outs = scale.shape
    qzeros = parts["qzeros"]
    bits = 32 * qzeros.shape[1] // num_outs
    if bits not in (4, 8) or qzeros.shape != (num_groups, num_outs * bits // 32) or qweight.shape[1] != num_outs:
        raise ValueError(
            f"qweight {list(qweight.shape)}, qzeros {list(qzeros.shape)} and scales {list(scale.shape)} do not fit together as "
            "numbers of 4 or 8 bits"
        )
    zero = _unpacked(qzeros, bits, zero_offset)
    return _integers(_bytes(qweight.T), scale.T, zero.T, parts.get("g_idx"), bits, dtype)


def awq_weight(parts: Parts, dtype: torch.dtype) -> StoredWeight:
    """AWQ's ``gemm``: words of eight outputs in a permuted order."""
    qweight, qzeros, scale = parts["qweight"], parts["qzeros"], parts["scales"]
    num_ins, num_outs = qweight.shape[0], 8 * qweight.shape[1]
    if scale.shape[1:] != (num_outs,) or qzeros.shape != (scale.shape[0], num_outs // 8) or num_ins % 2:
        raise ValueError(
            f"qweight {list(qweight.shape)}, qzeros {list(qzeros.shape)} and scales {list(scale.shape)} do not fit together as "
            "numbers of 4 bits"
        )

    def in_order(words: torch.Tensor) -> torch.Tensor:
        return _unpacked(words, 4).view(len(words), -1, 8)[:, :, _AWQ_ORDER].reshape(len(words), num_outs).T

    return _integers(_pairs(in_order(qweight)), scale.T, in_order(qzeros), None, 4, dtype)


def mxfp4_weight(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> StoredWeight:
    """MXFP4: 32 numbers of e2m1 in 16 bytes, with one power of two (e8m0).

    ``blocks`` ``[..., out, num_blocks, 16]`` and ``scales`` ``[..., out, num_blocks]``, both uint8. The result stacks the matrices.
    """
    if blocks.shape != (*scales.shape, 16) or blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(
            f"blocks {blocks.dtype} {list(blocks.shape)} and scales {scales.dtype} {list(scales.shape)} are no MXFP4"
        )
    num_blocks = scales.shape[-1]
    values, scale = blocks.reshape(-1, 16 * num_blocks), scales.reshape(-1, num_blocks)
    return StoredWeight(values, scale, zero=None, group_size=32, order=None, dtype=dtype)


def fp4_weight(parts: Parts, dtype: torch.dtype) -> StoredWeight:
    """DeepSeek-V4's experts: MXFP4's numbers in a matrix ``[out, in / 2]`` of int8, with scales ``[out, in / 32]`` of e8m0."""
    weight, scale = parts["weight"], parts["weight_scale_inv"]
    num_outs, num_columns = weight.shape
    if scale.shape != (num_outs, num_columns // 16) or num_columns % 16 or scale.dtype != torch.float8_e8m0fnu:
        raise ValueError(
            f"it is int8 {list(weight.shape)} with scales {scale.dtype} {list(scale.shape)}; two numbers of 4 bits in each, and a "
            "scale of float8_e8m0fnu for 32 of them, can be read"
        )
    blocks = weight.contiguous().view(torch.uint8).view(num_outs, -1, 16)
    return mxfp4_weight(blocks, scale.contiguous().view(torch.uint8), dtype)


def _integers(
    values: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    groups: torch.Tensor | None,
    bits: int,
    dtype: torch.dtype,
) -> StoredWeight:
    """From bytes ``[out, in * bits / 8]`` of integers with half their range added. ``zero`` has it added, too, with 4 bits."""
    num_ins = values.shape[1] * 8 // bits
    num_outs, num_groups = scale.shape
    group_size = _group_size(num_ins, num_groups)
    if bits == 4 and zero is None:
        zero = torch.full((num_outs, num_groups), 8, dtype=torch.uint8, device=values.device)
    if bits == 8:
        values = (values ^ _SIGN).view(torch.int8)
    if zero is not None and zero.shape != scale.shape:
        raise ValueError(f"its zeros are {list(zero.shape)}, its scales {list(scale.shape)}")
    order = None if groups is None else _order(groups, num_ins, group_size)
    if order is not None:
        columns = order.to(values.device)
        values = _pairs(halves(values)[:, columns]) if bits == 4 else values[:, columns]
    zero = None if zero is None else zero.contiguous()
    return StoredWeight(values.contiguous(), scale.contiguous(), zero, group_size, order, dtype)


def _order(groups: torch.Tensor, num_ins: int, group_size: int) -> torch.Tensor | None:
    """Input features sorted by ``groups``; None if they are in order.

    Raises ValueError unless each group has ``group_size`` inputs.
    """
    in_order = torch.arange(num_ins, device=groups.device) // group_size
    ordered, order = groups.long().sort(stable=True)
    if not torch.equal(ordered, in_order):
        raise ValueError(f"its g_idx {list(groups.shape)} does not put {num_ins} inputs into groups of {group_size}")
    return None if torch.equal(groups.long(), in_order) else order


def _group_size(num_ins: int, num_groups: int) -> int:
    """The size of all groups. Raises ValueError if they differ."""
    if num_groups < 1 or num_ins % num_groups:
        raise ValueError(f"{num_ins} inputs do not fall into {num_groups} groups of one size")
    return num_ins // num_groups


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """``[n, m]`` words of 32 bits as ``[n, 4 * m]`` bytes, the lowest first."""
    if words.dtype != torch.int32:
        raise ValueError(f"its words are {words.dtype}, not int32")
    dense = words.contiguous()
    if dense.stride(1) != 1:  # a single column, which is contiguous whatever its stride
        dense = dense.clone(memory_format=torch.contiguous_format)
    return dense.view(torch.uint8)


def _pairs(numbers: torch.Tensor) -> torch.Tensor:
    """The inverse of ``halves``."""
    return numbers[:, 0::2] | numbers[:, 1::2] << 4


def _unpacked(words: torch.Tensor, bits: int, offset: int = 0) -> torch.Tensor:
    """The integers in words ``[n, m]``: uint8 for 4 bits; int8 (minus 128) for 8 bits. ``offset`` is added modulo the bits."""
    if bits == 4:
        return halves(_bytes(words)) + offset & 15
    return (_bytes(words) + offset ^ _SIGN).view(torch.int8)
