"""Recorded messages and blocks of released versions: this build understands them, and those versions understand this build.

A failure here means that workers and gateways of two versions would misunderstand each other (docs/compatibility.md). To repair it,
give a field a default, or use a new protocol number. Never change a recording.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import kvrelay
from kvrelay.common.block_digests import landed
from kvrelay.wire.blocks.frames import parse_header
from kvrelay.wire.blocks.seal import KEY_NBYTES, BlockOpener
from kvrelay.wire.codec import Codec
from kvrelay.wire.errors import MalformedMessageError
from kvrelay.wire.lines.shared.packets import parse_greeting, parse_slots, refusal_in, split_block
from kvrelay.wire.messages import (
    PROTOCOL_MAX,
    Cancel,
    Cancelled,
    Failed,
    FailureCode,
    Hello,
    Message,
    PromptChunk,
    Role,
    Status,
    WorkerState,
    common_protocol,
)

from .links import Net, next_of
from .recorded.examples import HERE, LAYOUT, MESSAGES, PAYLOAD, recorded_block, recording, says

VERSIONS = {path.stem: json.loads(path.read_text()) for path in sorted(HERE.glob("*.json"))}
FRAMES = [
    pytest.param(one, id=f"{version}-{number}-{one['says']['type']}")
    for version, recorded in VERSIONS.items()
    for number, one in enumerate(recorded["messages"])
]
BLOCKS = [
    pytest.param(one, id=f"{version}-{'sealed' if one['says']['is_sealed'] else 'plain'}")
    for version, recorded in VERSIONS.items()
    for one in recorded["blocks"]
]


def assert_holds(now: Any, then: Any) -> None:
    """Check that ``now`` equals ``then``, except that its maps may have more keys."""
    if isinstance(then, dict):
        assert isinstance(now, dict)
        assert then.keys() <= now.keys()
        for key, value in then.items():
            assert_holds(now[key], value)
    elif isinstance(then, list):
        assert isinstance(now, list)
        assert len(now) == len(then)
        for one, other in zip(now, then, strict=True):
            assert_holds(one, other)
    else:
        assert now == then


def decoded(frame: str) -> Message:
    return Codec().decode(bytes.fromhex(frame))


@pytest.mark.parametrize("recorded", FRAMES)
def test_a_recorded_message_is_understood(recorded: dict[str, Any]) -> None:
    assert_holds(says(decoded(recorded["frame"])), recorded["says"])


@pytest.mark.parametrize("recorded", FRAMES)
def test_the_recorded_version_finds_its_fields_in_what_this_build_says(recorded: dict[str, Any]) -> None:
    """The recorded version ignores unknown fields. So every field that it knows must be there, unchanged."""
    frame = Codec().encode(decoded(recorded["frame"]))
    assert_holds(msgspec.msgpack.decode(frame), msgspec.msgpack.decode(bytes.fromhex(recorded["frame"])))


def with_news(value: Any) -> Any:
    """The value with an unknown field in each of its maps."""
    if isinstance(value, dict):
        more = {key: value[key] if key == "used" else with_news(value[key]) for key in value}  # by API key, not fields
        return {**more, "of_tomorrow": [{"x": 1}]}
    return [with_news(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: type(one).__name__)
def test_fields_that_are_not_known_are_ignored(message: Message) -> None:
    news = with_news(msgspec.msgpack.decode(Codec().encode(message)))
    assert Codec().decode(msgspec.msgpack.encode(news)) == message


def test_more_elements_of_what_travels_as_an_array_are_ignored() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode([0.0, 0.5, 3, "new"]), type=PromptChunk) == PromptChunk(
        0.0, 0.5, 3
    )


def structs_in(value: Any) -> Iterator[msgspec.Struct]:
    if isinstance(value, msgspec.Struct):
        yield value
        for name in value.__struct_fields__:
            yield from structs_in(getattr(value, name))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from structs_in(one)


def test_a_field_that_is_missing_has_its_default() -> None:
    """Each optional field is left out once, as by an older sender, and gets its default. The examples use every such field."""
    seen: set[tuple[type, str]] = set()
    optional: set[tuple[type, str]] = set()
    for struct in [one for message in MESSAGES for one in structs_in(message)]:
        kind = type(struct)
        for field in msgspec.structs.fields(kind):
            if field.required or kind.__struct_config__.array_like:
                continue
            optional.add((kind, field.name))
            default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
            if getattr(struct, field.name) == default:
                continue
            seen.add((kind, field.name))
            told = msgspec.msgpack.decode(msgspec.msgpack.encode(struct))
            del told[field.encode_name]
            assert getattr(msgspec.convert(told, kind), field.name) == default
    always = {(Hello, "protocol_min"), (Hello, "protocol_max")}  # this build's own numbers are always sent
    assert optional - seen == always


def test_every_type_of_message_has_an_example() -> None:
    assert {type(one) for one in MESSAGES} == set(typing.get_args(Message))


@pytest.mark.parametrize("code", ["of_tomorrow", "no_room"])
def test_a_failure_of_a_kind_that_is_not_known_is_an_internal_one(code: str) -> None:
    told = {"type": "Failed", "request_id": "r", "attempt": 1, "code": code, "detail": "new"}
    failed = Codec().decode(msgspec.msgpack.encode(told))
    assert isinstance(failed, Failed)
    assert failed.code is (FailureCode.NO_ROOM if code == "no_room" else FailureCode.INTERNAL)


def test_a_worker_in_a_state_that_is_not_known_gets_nothing_new() -> None:
    [status] = [one for one in MESSAGES if isinstance(one, Status)]
    told = {**msgspec.msgpack.decode(Codec().encode(status)), "state": "of_tomorrow"}
    read = Codec().decode(msgspec.msgpack.encode(told))
    assert isinstance(read, Status)
    assert read.state is WorkerState.DRAINING


async def test_a_message_of_a_type_that_is_not_known_is_dropped_and_the_link_goes_on(net: Net) -> None:
    worker, server, initiator, client = await net.linked()
    frame = msgspec.msgpack.encode({"type": "OfTomorrow", "request_id": "r"})
    with pytest.raises(MalformedMessageError, match="OfTomorrow"):
        Codec().decode(frame)
    assert client._socket is not None
    assert client._socket.send([frame])
    assert server._socket.send([server._routes[Role.PREFILL, "p"], frame])
    assert client.send(Cancel(request_id="r", attempt=1))
    assert (await next_of(worker.heard))[2] == Cancel(request_id="r", attempt=1)
    assert server.send(Role.PREFILL, "p", Cancelled(request_id="r", attempt=1))
    assert await next_of(initiator.events) == Cancelled(request_id="r", attempt=1)
    assert net.counted("refused_messages", cause="malformed") == 2


@pytest.mark.parametrize(
    ("theirs", "common"),
    [
        pytest.param((1, PROTOCOL_MAX + 1), PROTOCOL_MAX, id="one-more"),
        pytest.param((1, 1), 1, id="the-first"),
        pytest.param((PROTOCOL_MAX + 1, PROTOCOL_MAX + 2), None, id="newer-ones-only"),
        pytest.param((0, 0), None, id="an-older-one-only"),
    ],
)
def test_the_largest_protocol_number_that_both_speak_is_used(theirs: tuple[int, int], common: int | None) -> None:
    assert (
        common_protocol(Hello(role=Role.GATEWAY, peer_id="g", protocol_min=theirs[0], protocol_max=theirs[1])) == common
    )


@pytest.mark.parametrize("recorded", BLOCKS)
def test_a_recorded_block_is_read_and_written_as_it_was(recorded: dict[str, Any]) -> None:
    """Workers of two versions must agree on every byte of a block's frames, because the header's checksum or seal covers them."""
    header = parse_header(bytes.fromhex(recorded["header"]))
    payload, target = memoryview(bytes.fromhex(recorded["payload"])), bytearray(len(PAYLOAD))
    if header.is_sealed:
        assert BlockOpener(bytes(range(KEY_NBYTES))).open(header, payload, memoryview(target))
    else:
        assert header.checksum == header.checksum_of(landed(payload, memoryview(target)))
    assert target == PAYLOAD
    meant = recorded["says"]
    assert_holds(says(msgspec.structs.replace(header, checksum=0)), meant)
    assert recorded_block(header) == recorded | {"says": says(header)}


@pytest.mark.parametrize("version", VERSIONS)
def test_packets_beside_shared_memory_are_as_they_were(version: str) -> None:
    packets = VERSIONS[version]["shared_memory"]
    assert packets == recording()["shared_memory"]
    greeting, block, slots, yes, no = (bytes.fromhex(one) for one in packets.values())
    read = parse_greeting(greeting)
    assert (read.shape.slot_nbytes, read.shape.num_slots, read.token) == (8192, 4, b"token")
    number, frame = split_block(block)
    assert (number, parse_header(frame).block_index) == (3, 3)
    assert parse_slots(slots) == [1, 2]
    assert refusal_in(yes) is None
    assert "no room" in (refusal_in(no) or "")


@pytest.mark.parametrize("version", VERSIONS)
def test_fingerprints_and_hashes_of_blocks_are_as_they_were(version: str) -> None:
    """Workers of two versions can only hand over to each other if their fingerprints and hashes are equal."""
    assert recording()["hashes"] == VERSIONS[version]["hashes"]
    assert VERSIONS[version]["hashes"]["fingerprint"] == LAYOUT.fingerprint().hex()


def test_the_recording_of_this_version_is_what_it_says() -> None:
    """An unreleased version may be recorded again by ``python -m tests.wire.recorded.examples``. A released one is kept."""
    recorded = VERSIONS.get(kvrelay.__version__)
    assert recorded in (None, recording())
