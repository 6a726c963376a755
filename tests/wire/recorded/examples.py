"""Examples of everything the wire carries, with every field in use, and how they are recorded for later versions.

.venv/bin/python -m tests.wire.recorded.examples     writes recorded/VERSION.json, at a release (CONTRIBUTING.md)

A recording is never changed: it holds the bytes that a released version sends. ``says`` holds their meaning.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

import kvrelay
from kvrelay.common.adapter_files import AdapterRef
from kvrelay.common.block_digests import digests_of
from kvrelay.common.block_hash import HashChain
from kvrelay.common.fair_queue import Flow
from kvrelay.common.images import ImageSpan, ImageText, ImageTexts, PromptImage
from kvrelay.common.kv_geometry import GroupKind, KvGeometry, KvGroup
from kvrelay.common.model_card import KvLayout, ModelCard
from kvrelay.common.retention import Retention
from kvrelay.common.sampling import BeamSearch, FinishReason, Guide, GuideKind, SampledToken, SamplingParams, Watermark
from kvrelay.wire.blocks.frames import BlockHeader
from kvrelay.wire.blocks.seal import KEY_NBYTES, TAG_NBYTES, BlockSealer
from kvrelay.wire.codec import Codec
from kvrelay.wire.lines.shared.packets import Greeting, pack_answer, pack_block, pack_slots
from kvrelay.wire.lines.shared.ring import RingShape
from kvrelay.wire.messages import (
    ABOUT_IMAGES,
    Abort,
    AskImages,
    Beam,
    Bye,
    Cancel,
    Cancelled,
    Commit,
    DecodeTarget,
    Distrust,
    Failed,
    FailureCode,
    Grant,
    HandedOver,
    Hello,
    HelloRefused,
    ImagesTold,
    KeyTokens,
    Message,
    Offer,
    Ping,
    Preempted,
    PromptChunk,
    Refuse,
    Reject,
    Renew,
    Role,
    Status,
    Submit,
    Timings,
    TokenDelta,
    Tokens,
    Verified,
    Welcome,
    Withdraw,
    Withdrawn,
    WorkerState,
)

HERE = Path(__file__).parent

_KEY: dict[str, Any] = {"request_id": "chatcmpl-1", "attempt": 2}
_LEASE: dict[str, Any] = {"lease_id": 2**63 + 5, "epoch": 2**62 + 3}
_HASH = bytes(range(16))
LAYOUT = KvLayout(
    model_id="Qwen/Qwen3-8B",
    weights_digest="9f86d081",
    geometry=KvGeometry(
        groups=(
            KvGroup(kind=GroupKind.FULL, layers=(0, 2), num_kv_heads=2, key_size=64, value_size=32, dtype="bfloat16"),
            KvGroup(
                kind=GroupKind.WINDOW,
                window=32,
                layers=(1,),
                num_kv_heads=1,
                key_size=64,
                value_size=64,
                dtype="float8_e4m3fn",
            ),
        ),
        block_size=16,
    ),
    rope='{"theta":10000.0}',
    kv_scales="e3b0c442",
)
_CARD = ModelCard(
    layout=LAYOUT,
    vocab_size=151_936,
    max_model_len=40_960,
    num_blocks=4096,
    device_type="cuda",
    processors=("upper",),
    no_images="",
)
_SAMPLING = SamplingParams(
    max_tokens=64,
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    typical_p=0.95,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    min_tokens=2,
    logit_bias=((7, -1.5),),
    allowed_token_ids=(5, 6, 7),
    num_prompt_logprobs=1,
    guide=Guide(kind=GuideKind.JSON_SCHEMA, text='{"type":"object"}'),
    processors=("upper",),
    beam_search=BeamSearch(width=4, num_return=2, length_penalty=0.8, early_stopping=True),
    seed=2**63,
    stop_token_ids=(2, 3),
    num_logprobs=2,
    choice=1,
    bad_words=((8, 9),),
    watermark=Watermark(gamma=0.25, delta=1.5),
)
_TOKEN = SampledToken(11, -0.5, ((11, -0.5), (12, -1.5)))
_REQUEST: dict[str, Any] = {
    **_KEY,
    "token_ids": [1, 2, 3, 70_000],
    "num_prompt_tokens": 3,
    "sampling": _SAMPLING,
    "timeout_s": 59.5,
    "retention": Retention(priority=90, ttl_s=30.0),
    "cache_salt": "tenant-1",
    "adapter": AdapterRef("legal", "c0ffee"),
    "flow": Flow("key-1", -3, 2.5),
    "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
}
_SPAN = ImageSpan(1, 3, bytes(16))
_DELTA = TokenDelta(
    **_KEY,
    index=3,
    tokens=[_TOKEN, SampledToken(13)],
    finish_reason=FinishReason.LENGTH,
    num_cached_tokens=2,
    timings=Timings(queue_s=0.1, prefill_s=0.2, transfer_s=0.3, first_step_s=0.4, chunks=[PromptChunk(0.0, 0.2, 3)]),
    prompt_logprobs=[_TOKEN],
    beams=[Beam(tokens=[_TOKEN], finish_reason=FinishReason.STOP, score=-0.25)],
)

MESSAGES: Sequence[Message] = (
    Hello(role=Role.GATEWAY, peer_id="gateway-1"),
    Hello(role=Role.PREFILL, peer_id="prefill-1", protocol_min=1, protocol_max=1, layout=LAYOUT, seals_kv=True),
    Welcome(
        role=Role.DECODE, worker_id="decode-1", epoch=2**62 + 3, protocol=1, card=_CARD, model="qwen",
        data_address="tcp://0.0.0.0:7201", data_token="token", shared_memory="@kvrelay-1",
    ),
    HelloRefused(code=FailureCode.LAYOUT_MISMATCH, detail="block_size: 16 / 32"),
    Ping(),
    Bye(),
    Status(
        state=WorkerState.READY, num_running=1, num_waiting=2, num_waiting_tokens=300, num_free_blocks=4000,
        num_blocks=4096, max_running=64, prompt_tokens_per_s=9000.5, adapters=["c0ffee"], num_arriving=1,
    ),
    KeyTokens(gateway="gateway-1", number=7, used={"key-1": (100, 2000)}, age_s=1.5),
    Distrust(peer_id="prefill-1"),
    AskImages(query=7, sizes=[(640, 480), (32, 32)]),
    ImagesTold(query=7, told=ImageTexts("<image>", 151_655, [ImageText("<pad><pad>", 2), ImageText("<pad>", 1)])),
    ImagesTold(query=8, problem="an image of 1 x 9000 pixels is too narrow"),
    Submit(**_REQUEST, decode=DecodeTarget(address="tcp://10.0.0.2:7200"), max_uncached_tokens=128,
           images=[PromptImage(_SPAN, b"\x89PNG")]),
    Submit(**_KEY, token_ids=[1], num_prompt_tokens=1, sampling=SamplingParams(max_tokens=1)),
    Withdraw(**_KEY),
    Cancel(**_KEY),
    Tokens(items=[_DELTA, TokenDelta(**_KEY, index=0, tokens=[])]),
    HandedOver(**_KEY),
    Preempted(**_KEY),
    Withdrawn(**_KEY),
    Failed(**_KEY, code=FailureCode.QUEUE_FULL, detail="64 requests wait", retry_after_s=2.0, about="guide"),
    Failed(**_KEY, code=FailureCode.INVALID, detail="image 0 cannot be read", about=ABOUT_IMAGES),
    Cancelled(**_KEY),
    Offer(**_REQUEST, gateway_id="gateway-1", fingerprint=LAYOUT.fingerprint(), block_hashes=[_HASH, bytes(16)],
          images=[_SPAN]),
    Grant(**_KEY, **_LEASE, num_cached_blocks=1, ttl_s=30.0, seal_key=bytes(range(KEY_NBYTES))),
    Refuse(**_KEY, code=FailureCode.NO_ROOM, detail="12 blocks are free", retry_after_s=0.5),
    Commit(**_LEASE, chain_hash=_HASH, first_token=_TOKEN, num_cached_tokens=2, position_offset=-5),
    Verified(**_LEASE),
    Reject(**_LEASE, code=FailureCode.INTEGRITY, detail="piece 0 of block 1"),
    Renew(**_LEASE),
    Abort(**_LEASE, reason="the request was cancelled"),
)  # fmt: skip

HEADERS = tuple(
    BlockHeader(**_LEASE, block_index=3, payload_nbytes=48, block_hash=_HASH, piece_index=1, is_sealed=one)
    for one in (False, True)
)
PAYLOAD = bytes(range(48))


def says(value: Any) -> Any:
    """The meaning of a value as JSON: all fields by name, including those with their default."""
    if isinstance(value, msgspec.Struct):
        tag = value.__struct_config__.tag
        fields = {name: says(getattr(value, name)) for name in value.__struct_fields__}
        return fields if tag is None else {"type": tag, **fields}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {key: says(one) for key, one in value.items()}
    return [says(one) for one in value] if isinstance(value, list | tuple) else value


def recording() -> dict[str, Any]:
    """The recording of this version."""
    codec = Codec()
    return {
        "messages": [{"frame": codec.encode(one).hex(), "says": says(one)} for one in MESSAGES],
        "blocks": [recorded_block(header) for header in HEADERS],
        "shared_memory": {
            "greeting": Greeting(RingShape(8192, 4), b"token").pack().hex(),
            "block": pack_block(3, HEADERS[1].pack_sealed()).hex(),
            "slots": pack_slots([1, 2]).hex(),
            "yes": pack_answer(None).hex(),
            "no": pack_answer("no room").hex(),
        },
        "hashes": {
            "fingerprint": LAYOUT.fingerprint().hex(),
            "plain": says(HashChain(bytes(16), 4).hashes_of_all(range(10))),
            "keyed": says(
                HashChain(bytes(16), 4, cache_salt="s", adapter=AdapterRef("a", "d")).hashes_of_all(range(10))
            ),
            "images": says(
                HashChain(bytes(16), 4, images=[_SPAN, ImageSpan(3, 9, bytes(range(16)))]).hashes_of_all(range(10))
            ),
        },
    }


def recorded_block(header: BlockHeader) -> dict[str, Any]:
    """Both frames of a piece, plain or sealed under a fixed key."""
    key, payload = bytes(range(KEY_NBYTES)), memoryview(PAYLOAD)
    if header.is_sealed:
        target = memoryview(bytearray(len(payload) + TAG_NBYTES))
        frames = BlockSealer(key).seal(header, payload, target), bytes(target)
    else:
        frames = header.pack(digests_of(payload)), PAYLOAD
    return {"header": frames[0].hex(), "payload": frames[1].hex(), "says": says(header)}


if __name__ == "__main__":
    (HERE / f"{kvrelay.__version__}.json").write_text(json.dumps(recording(), indent=1) + "\n")
