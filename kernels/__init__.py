"""Triton kernels of the model's hot path, each beside its torch reference.

A wrapper checks its arguments and launches on the current CUDA (or HIP) device; no wrapper reads device
values on the host. The `*_reference` functions keep the same contract in torch operations, on any device.
Importing this package needs triton but no GPU. Not for weights, models or scheduling: it imports nothing
else of kvrelay.
"""

from kvrelay.kernels.activation import silu_mul, silu_mul_reference
from kvrelay.kernels.decode_attention import (
    DecodeWorkspace,
    paged_decode_attention,
    paged_decode_attention_reference,
    splits_for_device,
)
from kvrelay.kernels.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from kvrelay.kernels.penalties import NewTokens, apply_penalties, apply_penalties_reference
from kvrelay.kernels.prefill_attention import paged_prefill_attention, paged_prefill_attention_reference
from kvrelay.kernels.rotary import rotary_kv_write, rotary_kv_write_reference, rotary_reference
from kvrelay.kernels.sampling import kept_mask_reference, sample, sample_reference

__all__ = [
    "DecodeWorkspace",
    "NewTokens",
    "add_rms_norm",
    "add_rms_norm_reference",
    "apply_penalties",
    "apply_penalties_reference",
    "kept_mask_reference",
    "paged_decode_attention",
    "paged_decode_attention_reference",
    "paged_prefill_attention",
    "paged_prefill_attention_reference",
    "rms_norm",
    "rms_norm_reference",
    "rotary_kv_write",
    "rotary_kv_write_reference",
    "rotary_reference",
    "sample",
    "sample_reference",
    "silu_mul",
    "silu_mul_reference",
    "splits_for_device",
]
