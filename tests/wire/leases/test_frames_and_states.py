"""Block headers, the hand-off's transition table and the codec, without sockets."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from msgspec.structs import replace

from kvrelay.common.block_digests import digests_of
from kvrelay.common.images import ImageSpan, PromptImage
from kvrelay.common.sampling import SamplingParams
from kvrelay.wire.blocks.frames import HEADER_NBYTES, BlockHeader, parse_header
from kvrelay.wire.codec import MAX_CONTROL_FRAME_NBYTES, MAX_FRAME_NBYTES_WITH_IMAGES, Codec
from kvrelay.wire.errors import BlockRefusedError, MalformedMessageError
from kvrelay.wire.leases.states import TRANSITIONS, HandoffState, advance
from kvrelay.wire.messages import Hello, Ping, Role, Submit

HEADER = BlockHeader(
    lease_id=2**40,
    epoch=2**63,
    block_index=2**32 - 1,
    payload_nbytes=8,
    block_hash=b"h" * 16,
    piece_index=2**16 - 1,
)
DIGESTS = digests_of(memoryview(b"payload!"))


def test_a_header_survives_the_wire() -> None:
    parsed = parse_header(HEADER.pack(DIGESTS))
    assert parsed == replace(HEADER, checksum=HEADER.checksum_of(DIGESTS))
    assert parse_header(HEADER.pack_sealed()) == replace(HEADER, is_sealed=True)


@pytest.mark.parametrize("nbytes", [0, 1, HEADER_NBYTES - 1, HEADER_NBYTES + 1])
def test_a_frame_of_another_size_is_no_header(nbytes: int) -> None:
    with pytest.raises(BlockRefusedError) as caught:
        parse_header(bytes(nbytes))
    assert caught.value.cause_name == "bad_header"


def test_advance_follows_the_table_and_nothing_else() -> None:
    for state, new_state in itertools.product(HandoffState, HandoffState):
        if new_state in TRANSITIONS[state]:
            assert advance(state, new_state, "x") is new_state
        else:
            with pytest.raises(ValueError, match=f"x: no transition {state.name} -> {new_state.name}"):
                advance(state, new_state, "x")


def test_a_message_survives_the_wire_and_unknown_fields_are_ignored() -> None:
    codec = Codec()
    hello = Hello(role=Role.PREFILL, peer_id="p")
    assert codec.decode(codec.encode(hello)) == hello
    assert codec.decode(msgspec.msgpack.encode({"type": "Ping", "from_the_future": [1, {"a": 2}]})) == Ping()


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff" * 9,
        msgspec.msgpack.encode({"type": "Nope"}),
        msgspec.msgpack.encode({"type": "Hello", "role": "prefill"}),
        # An unknown field that is nested too deeply for the decoder.
        b"\x82\xa4type\xa4Ping\xa3zzz" + b"\x91" * 200_000 + b"\xc0",
    ],
)
def test_what_is_no_message_raises_malformed(frame: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        Codec().decode(frame)


def test_both_directions_are_bounded() -> None:
    with pytest.raises(MalformedMessageError, match="exceeds"):
        Codec().encode(Hello(role=Role.PREFILL, peer_id="p" * MAX_CONTROL_FRAME_NBYTES))
    with pytest.raises(MalformedMessageError, match="exceeds"):
        Codec().decode(bytes(MAX_CONTROL_FRAME_NBYTES + 1))


def test_images_have_room_that_other_messages_and_workers_without_encoders_do_not_have() -> None:
    def submit(num_bytes: int) -> Submit:
        images = [PromptImage(ImageSpan(0, 4, bytes(16)), bytes(num_bytes))]
        sampling = SamplingParams(max_tokens=1)
        return Submit(
            request_id="r", attempt=1, token_ids=[1] * 9, num_prompt_tokens=9, sampling=sampling, images=images
        )

    frame = Codec().encode(submit(20 * 10**6))
    assert Codec(MAX_FRAME_NBYTES_WITH_IMAGES).decode(frame) == submit(20 * 10**6)
    with pytest.raises(MalformedMessageError, match="exceeds"):
        Codec().decode(frame)
    with pytest.raises(MalformedMessageError, match="exceeds"):
        Codec().encode(submit(MAX_FRAME_NBYTES_WITH_IMAGES))
