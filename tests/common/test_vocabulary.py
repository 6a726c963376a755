"""Block hashes, fingerprints of layouts, and log lines."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from itertools import islice

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.common.block_hash import HASH_NBYTES, HashChain
from kvrelay.common.kv_geometry import GroupKind, KvGeometry, KvGroup
from kvrelay.common.logs import JsonFormatter, TextFormatter, configure_logs
from kvrelay.common.model_card import KvLayout
from kvrelay.common.sampling import SamplingParams

TOKENS = st.lists(st.integers(0, 2**31), max_size=40)

GROUP = KvGroup(kind=GroupKind.FULL, layers=(0, 1), num_kv_heads=1, key_size=64, value_size=32, dtype="bfloat16")
LAYOUT = KvLayout(
    model_id="m",
    weights_digest="w",
    geometry=KvGeometry(groups=(GROUP,), block_size=16),
    rope="r",
)


def hashes_of(token_ids: list[int], block_size: int) -> list[bytes]:
    return HashChain(b"model", block_size).hashes_of_all(token_ids)


@given(first=TOKENS, second=TOKENS, size=st.integers(1, 8))
def test_hashes_agree_exactly_as_far_as_the_tokens_do(first: list[int], second: list[int], size: int) -> None:
    one, other = hashes_of(first, size), hashes_of(second, size)
    assert len(one) == -(-len(first) // size)
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        assert (left == right) == (first[: (index + 1) * size] == second[: (index + 1) * size])


@given(tokens=TOKENS, size=st.integers(1, 8), steps=st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=4))
def test_a_chain_gives_the_same_hashes_however_it_is_asked(
    tokens: list[int], size: int, steps: list[tuple[int, bool]]
) -> None:
    """Hashes are asked for in parts, lazily and from a copy with other tokens. They equal those of a new chain."""
    whole, chain = hashes_of(tokens, size), HashChain(b"model", size)
    for num_tokens, is_lazy in steps:
        some = tokens[:num_tokens]
        num_full = len(some) // size
        if is_lazy:
            assert list(islice(chain.iterate(tokens, len(tokens) // size), num_full)) == whole[:num_full]
        else:
            assert chain.hashes(some, num_full) == whole[:num_full]
            assert chain.hashes_of_all(some)[:num_full] == whole[:num_full]
        assert list(chain.known) == whole[: len(chain.known)]
    num_known = len(chain.known)
    other = [*tokens[: num_known * size], *range(3 * size)]
    assert chain.copy().hashes_of_all(other) == hashes_of(other, size)
    assert chain.hashes_of_all(tokens) == whole


def test_model_and_extra_keys_are_part_of_every_hash_of_a_chain() -> None:
    chains = [
        HashChain(fingerprint, 2, cache_salt=salt).hashes([1, 2, 3, 4], 2)
        for fingerprint, salt in ((b"model", ""), (b"other", ""), (b"model", "mine"), (b"model", "yours"))
    ]
    assert len({one for hashes in chains for one in hashes}) == 8


def test_fingerprints_are_equal_exactly_for_equal_layouts() -> None:
    assert LAYOUT.fingerprint() == msgspec.structs.replace(LAYOUT).fingerprint()
    for names, other in others():
        assert other.fingerprint() != LAYOUT.fingerprint()
        assert [text.split(":")[0] for text in LAYOUT.differences(other)] == names
        assert LAYOUT.differences(msgspec.structs.replace(LAYOUT)) == []


def others() -> Iterator[tuple[list[str], KvLayout]]:
    """Layouts that each differ from ``LAYOUT`` in one field, with the names of the differences."""
    replace, geometry = msgspec.structs.replace, LAYOUT.geometry
    for name in ("model_id", "weights_digest", "rope", "kv_scales"):
        yield [name], replace(LAYOUT, **{name: getattr(LAYOUT, name) + "x"})
    yield ["block_size"], replace(LAYOUT, geometry=replace(geometry, block_size=17))
    changes: dict[str, object]
    sizes: list[dict[str, object]] = [{"num_kv_heads": 2}, {"key_size": 65}, {"value_size": 33}]
    for changes in [*sizes, {"layers": (0,)}, {"dtype": "float16"}, {"window": 8}]:
        (name,) = changes
        group = replace(GROUP, **changes)
        yield [f"group 0 {name}"], replace(LAYOUT, geometry=replace(geometry, groups=(group,)))
    more = replace(LAYOUT, geometry=replace(geometry, groups=(GROUP, GROUP)))
    yield [f"group 1 {name}" for name in KvGroup.__struct_fields__ if name != "window"], more


def test_bytes_follow_from_the_geometry() -> None:
    other = KvGroup(kind=GroupKind.FULL, layers=(2, 3, 5), num_kv_heads=4, key_size=8, value_size=8, dtype="float32")
    assert (GROUP.token_nbytes, other.token_nbytes) == (2 * 1 * (64 + 32) * 2, 3 * 4 * (8 + 8) * 4)
    geometry = KvGeometry(groups=(GROUP, other), block_size=16)
    assert geometry.token_nbytes == GROUP.token_nbytes + other.token_nbytes
    assert geometry.physical_nbytes == 16 * other.token_nbytes  # the larger group's
    assert geometry.block_nbytes == 2 * geometry.physical_nbytes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -1}, True),
        ({"frequency_penalty": 0.1}, True),
    ],
)
def test_penalties_are_known_to_be_needed(changes: dict[str, float], expected: bool) -> None:
    assert SamplingParams(max_tokens=1, **changes).needs_penalties is expected  # type: ignore[arg-type]


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("kvrelay.x", logging.WARNING, "f.py", 1, message, (), None)
    made.__dict__.update(extra)
    return made


def test_log_lines_carry_the_request() -> None:
    line = TextFormatter().format(record("lost", request_id="r", attempt=2))
    assert line.endswith("WARNING lost request_id=r attempt=2")
    parsed = json.loads(JsonFormatter().format(record("lost", request_id="r", attempt=2)))
    assert (parsed["level"], parsed["message"], parsed["request_id"], parsed["attempt"]) == ("warning", "lost", "r", 2)
    of_its_own = record("told", request_id="r", fields={"ttft_s": 0.5})
    assert TextFormatter().format(of_its_own).endswith("told request_id=r ttft_s=0.5")
    assert json.loads(JsonFormatter().format(of_its_own))["ttft_s"] == 0.5


def test_log_lines_carry_exceptions_and_only_known_fields() -> None:
    try:
        raise ValueError("bad, wörse")
    except ValueError:
        made = record("failed", secret="s", peer_id=b"\xff")
        made.exc_info = sys.exc_info()
    text = TextFormatter().format(made).splitlines()
    assert text[0].endswith("WARNING failed peer_id=b'\\xff'")
    assert (text[1], text[-1]) == ("Traceback (most recent call last):", "ValueError: bad, wörse")
    (line,) = JsonFormatter().format(made).splitlines()
    parsed = json.loads(line)
    assert parsed["exception"].endswith("ValueError: bad, wörse")
    assert (parsed["logger"], parsed["peer_id"]) == ("kvrelay.x", "b'\\xff'")
    assert "secret" not in parsed


def test_json_log_lines_carry_the_time_in_utc() -> None:
    made = record("x")
    made.created, made.msecs = 1_700_000_000.0625, 62.5
    assert json.loads(JsonFormatter().format(made))["time"] == "2023-11-14T22:13:20.062Z"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_logs_go_to_stderr_at_their_level(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    root, uvicorn = logging.getLogger(), logging.getLogger("uvicorn")
    before = root.handlers[:], root.level, uvicorn.level
    root.handlers.clear()  # pytest's own, which configure_logs would close
    try:
        configure_logs("info", log_format)
        logging.getLogger("kvrelay.x").info("told", extra={"request_id": "r"})
        logging.getLogger("kvrelay.x").debug("not told")
        logging.getLogger("uvicorn.error").info("not told")
        configure_logs("warning", log_format)
        logging.getLogger("kvrelay.x").info("not told")
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
        uvicorn.setLevel(before[2])
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    if log_format == "json":
        assert json.loads(line)["request_id"] == "r"
    else:
        assert line.endswith("INFO    told request_id=r")


def test_a_partial_block_has_a_hash_of_its_own() -> None:
    chain = HashChain(b"model", 2)
    hashes = chain.hashes_of_all([1, 2, 3])
    assert hashes[1] != chain.hashes_of_all([1, 2, 3, 4])[1]
    assert hashes_of([], 2) == []
    assert {len(one) for one in hashes} == {HASH_NBYTES}


def test_hashes_are_fixed_for_ever() -> None:
    # These may never change, because workers of different versions exchange blocks by them.
    assert hashes_of([1, 2, 3], 4)[0].hex() == "532d334796c6d0f9043259ca4159f08d"
    assert LAYOUT.fingerprint().hex() == "b90352c8efe595ef2cf9f41096d212e2"
