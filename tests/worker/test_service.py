"""Requests in the services of both roles: cancels and withdrawals, deadlines, guides, and the exchange of API keys' tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import Any

import msgspec
import pytest

from kvrelay.common.sampling import FinishReason, Guide, GuideKind
from kvrelay.engine.fake.engine import fake_card
from kvrelay.engine.fake.language import expected_output
from kvrelay.engine.guides.guidance import NoGuides
from kvrelay.wire.messages import (
    ABOUT_GUIDE,
    Cancel,
    Cancelled,
    FailureCode,
    Hello,
    KeyTokens,
    Role,
    Submit,
    Withdraw,
    Withdrawn,
)
from kvrelay.worker.entries import Entry, Phase
from tests.decode_worker.service_rig import Rig as DecodeRig
from tests.guides import tokens_guide
from tests.prefill_worker.service_rig import Rig as PrefillRig
from tests.worker.rig import ServiceRig

PROMPT = list(range(6))
WITHDRAW = Withdraw(request_id="a", attempt=1)


@pytest.fixture(params=[PrefillRig, DecodeRig], ids=["prefill", "decode"])
def rig(request: pytest.FixtureRequest) -> ServiceRig[Any]:
    made: ServiceRig[Any] = request.param()
    return made


def guided(rig: ServiceRig[Any], name: str, *token_ids: int, output: tuple[int, ...] = ()) -> Submit:
    plain = rig.submit(name, 8)
    sampling = msgspec.structs.replace(plain.sampling, guide=tokens_guide(*token_ids))
    return msgspec.structs.replace(plain, sampling=sampling, token_ids=[*plain.token_ids, *output])


def with_guide(rig: ServiceRig[Any], name: str, text: str) -> Submit:
    plain = rig.submit(name)
    guide = Guide(kind=GuideKind.REGEX, text=text)
    return msgspec.structs.replace(plain, sampling=msgspec.structs.replace(plain.sampling, guide=guide))


def assert_told(rig: ServiceRig[Any], name: str, output: list[int]) -> None:
    """Check the output, as far as this role sends it."""
    assert rig.output(name) == output[: rig.max_told]


def test_only_the_gateway_that_asked_can_cancel(rig: ServiceRig[Any]) -> None:
    rig.ask(rig.submit("a"))
    rig.ask(Cancel(request_id="a", attempt=1), "another")
    assert rig.sent == [("another", Cancelled(request_id="a", attempt=1))]
    rig.settle()
    assert_told(rig, "a", expected_output(PROMPT, 3, fake_card().vocab_size))
    rig.assert_nothing_left()


def test_a_gateways_end_cancels_its_own_requests_alone(rig: ServiceRig[Any]) -> None:
    rig.ask(rig.submit("a"), "gone")
    rig.ask(rig.submit("b"))
    rig.service.on_peer_lost("gone", Role.GATEWAY)
    rig.settle()
    assert rig.cancelled() == ["a"]
    assert_told(rig, "b", expected_output(PROMPT, 3, fake_card().vocab_size))
    rig.assert_nothing_left()


def test_a_cancel_that_crosses_a_failed_step_is_answered_once(rig: ServiceRig[Any]) -> None:
    rig.ask(rig.submit("a"))
    rig.handle()
    rig.model.on_step_failed(RuntimeError("boom"))
    rig.ask(Cancel(request_id="a", attempt=1))
    rig.settle()
    assert rig.cancelled() == ["a"]
    assert not rig.failures()
    rig.assert_nothing_left()


def test_a_request_that_waits_is_given_back_and_its_name_is_free(rig: ServiceRig[Any]) -> None:
    rig.ask(rig.submit("a"))
    rig.handle()
    rig.ask(WITHDRAW, "another")
    rig.ask(WITHDRAW)
    rig.ask(WITHDRAW)
    rig.settle()
    assert rig.sent == [("gateway", Withdrawn(request_id="a", attempt=1))]
    rig.ask(rig.submit("a"))
    rig.settle()
    assert_told(rig, "a", expected_output(PROMPT, 3, fake_card().vocab_size))
    rig.assert_nothing_left()


@pytest.mark.parametrize("is_heard", [True, False], ids=["known to the service", "not heard of yet"])
def test_a_request_that_has_begun_is_not_given_back(rig: ServiceRig[Any], is_heard: bool) -> None:
    rig.ask(rig.submit("a"))
    rig.handle()
    rig.model.step()
    if is_heard:
        rig.hear()
    rig.ask(WITHDRAW)
    rig.settle()
    assert not rig.told(Withdrawn)
    assert_told(rig, "a", expected_output(PROMPT, 3, fake_card().vocab_size))
    rig.assert_nothing_left()


@pytest.mark.parametrize("is_handled", [True, False], ids=["taken back already", "not taken back yet"])
def test_a_cancel_that_crosses_a_withdrawal_is_answered_once(rig: ServiceRig[Any], is_handled: bool) -> None:
    """A request is withdrawn and then cancelled. Only the cancel is answered, and the name stays taken until then."""
    rig.ask(rig.submit("a"))
    rig.handle()
    rig.ask(WITHDRAW)
    if is_handled:
        rig.handle()
    rig.ask(Cancel(request_id="a", attempt=1))
    rig.hear()
    rig.ask(rig.submit("a"))
    assert rig.failures() == [("a", FailureCode.INVALID)]
    rig.settle()
    assert rig.cancelled() == ["a"]
    assert not rig.told(Withdrawn)
    rig.assert_nothing_left()


def test_a_command_that_cannot_be_handled_ends_its_sequence_alone(rig: ServiceRig[Any]) -> None:
    rig.ask(rig.submit("a"))
    rig.ask(rig.submit("b"))
    rig.model.on_command_failed(rig.commands.pop(0), RuntimeError("boom"))
    rig.settle()
    assert rig.failures() == [("a", FailureCode.INTERNAL)]
    assert_told(rig, "b", expected_output(PROMPT, 3, fake_card().vocab_size))
    rig.assert_nothing_left()


@pytest.mark.parametrize("timeout_s", [0.0, -3.0, math.nan])
def test_a_request_that_comes_too_late_is_not_taken(rig: ServiceRig[Any], timeout_s: float) -> None:
    rig.ask(msgspec.structs.replace(rig.submit("a"), timeout_s=timeout_s))
    assert rig.failures() == [("a", FailureCode.DEADLINE)]
    assert not rig.commands
    rig.assert_nothing_left()


def test_a_request_whose_time_is_up_is_not_computed(rig: ServiceRig[Any]) -> None:
    rig.ask(msgspec.structs.replace(rig.submit("late"), timeout_s=5.0))
    rig.ask(rig.submit("patient"))
    rig.now_s += 4.9
    rig.service.tick()
    assert rig.failures() == []
    rig.now_s += 0.1
    rig.service.tick()
    rig.settle()
    assert rig.failures() == [("late", FailureCode.DEADLINE)]
    assert rig.output("late") == []
    assert_told(rig, "patient", expected_output(PROMPT, 3, fake_card().vocab_size))
    rig.assert_nothing_left()


def test_a_request_waits_for_its_guide_and_its_output_follows_it(rig: ServiceRig[Any]) -> None:
    rig.ask(guided(rig, "a", 77, 5, 9))
    rig.finish()
    status = rig.service.status()
    assert (status.num_waiting, status.num_waiting_tokens) == (1, len(PROMPT))
    assert not rig.sent
    rig.guides.answer()
    rig.settle()
    assert_told(rig, "a", [77, 5, 9])
    rig.assert_nothing_left()


def test_a_guide_that_ends_with_the_first_token_ends_the_request(rig: ServiceRig[Any]) -> None:
    rig.ask(guided(rig, "a", 77))
    rig.guides.answer()
    rig.settle()
    assert [delta.finish_reason for delta in rig.deltas("a")] == [FinishReason.STOP]
    rig.assert_nothing_left()


def test_an_attempt_that_replays_a_lost_one_goes_on_in_its_guide(rig: ServiceRig[Any]) -> None:
    rig.ask(guided(rig, "a", 77, 5, 9, output=(77, 5)))
    rig.ask(guided(rig, "b", 77, 5, 9, output=(77, 6)))
    rig.guides.answer()
    rig.settle()
    assert rig.output("a") == [9]
    [failed] = rig.failed()
    assert (failed.request_id, failed.code, failed.about) == ("b", FailureCode.INVALID, ABOUT_GUIDE)
    assert failed.detail == "6 came instead of 5"
    rig.assert_nothing_left()


@pytest.mark.parametrize(
    ("text", "code", "detail"),
    [
        ("bad", FailureCode.INVALID, "'bad' is not a guide"),
        ("broken", FailureCode.INTERNAL, "the compiler is out of order"),
    ],
)
def test_a_guide_that_does_not_compile_is_told_with_the_reason(
    rig: ServiceRig[Any], text: str, code: FailureCode, detail: str
) -> None:
    rig.ask(with_guide(rig, "a", text))
    rig.guides.answer()
    [failed] = rig.failed()
    assert (failed.code, failed.detail, failed.about) == (code, detail, ABOUT_GUIDE)
    rig.assert_nothing_left()


def test_a_worker_without_a_compiler_says_so(rig: ServiceRig[Any]) -> None:
    rig.service.connect(dataclasses.replace(rig.service.ports, guides=NoGuides()))
    rig.ask(guided(rig, "a", 1))
    assert rig.failures() == [("a", FailureCode.INVALID)]
    rig.assert_nothing_left()


@pytest.mark.parametrize("how", ["cancel", "deadline", "gateway lost"])
def test_what_ends_while_its_guide_compiles_is_told_once_and_its_name_is_free(rig: ServiceRig[Any], how: str) -> None:
    rig.ask(msgspec.structs.replace(guided(rig, "a", 77, 5), timeout_s=5.0))
    rig.end(how)
    assert not rig.service.entries
    rig.ask(guided(rig, "a", 9))
    assert not rig.commands
    rig.guides.answer()  # both requests' guides: the first request has ended and gets none
    rig.settle()
    assert len(rig.cancelled() + rig.failures()) == 1
    assert rig.output("a") == [9]
    rig.assert_nothing_left()


def test_a_dead_end_fails_its_request_alone(rig: ServiceRig[Any]) -> None:
    rig.ask(guided(rig, "a", -1, 5))
    rig.ask(guided(rig, "b", 8, 5))
    rig.guides.answer()
    rig.settle()
    [failed] = rig.failed()
    assert (failed.request_id, failed.code) == ("a", FailureCode.INVALID)
    assert "instead of -1" in failed.detail
    assert rig.output("a") == []
    assert_told(rig, "b", [8, 5])
    rig.assert_nothing_left()


async def test_a_drain_waits_for_what_compiles(rig: ServiceRig[Any]) -> None:
    rig.ask(guided(rig, "a", 77))
    drain = asyncio.ensure_future(rig.service.drain())
    await asyncio.sleep(0)  # the drain begins
    assert not drain.done()
    rig.ask(rig.submit("b"))
    assert rig.failures() == [("b", FailureCode.DRAINING)]
    rig.guides.answer()
    rig.settle()
    await drain
    rig.assert_nothing_left()


def test_an_entry_goes_no_way_that_its_table_does_not_have(rig: ServiceRig[Any]) -> None:
    rig.ask(rig.submit("a"))
    entry: Entry = rig.service.entries[("a", 1)]
    with pytest.raises(ValueError, match="no transition QUEUED -> HANDING_OVER"):
        entry.advance(Phase.HANDING_OVER)


def test_no_more_of_a_prompt_is_told_to_be_cached_than_it_has(rig: ServiceRig[Any]) -> None:
    """An attempt that repeats a lost one also finds output tokens cached. Only the prompt's cached tokens are reported."""
    plain = rig.submit("a")
    output = expected_output(PROMPT, 30, fake_card().vocab_size)
    for name in ("a", "b"):
        request = msgspec.structs.replace(plain, request_id=name, token_ids=[*PROMPT, *output])
        sampling = msgspec.structs.replace(plain.sampling, max_tokens=40)
        rig.ask(msgspec.structs.replace(request, sampling=sampling))
        rig.settle()
    told = [rig.deltas(name)[0].num_cached_tokens for name in ("a", "b")]
    assert told == [0, len(PROMPT)]


def test_there_is_work_as_long_as_there_are_requests(rig: ServiceRig[Any]) -> None:
    assert not rig.service.has_work.is_set()
    rig.ask(rig.submit("a"))
    assert rig.service.has_work.is_set()
    rig.settle()
    assert not rig.service.has_work.is_set()


def key_tokens(gateway: str, number: int, age_s: float = 0.0) -> KeyTokens:
    return KeyTokens(gateway=gateway, number=number, used={"alice": (number, number)}, age_s=age_s)


def test_what_a_gateway_tells_of_api_keys_reaches_the_others_and_those_that_come_later(rig: ServiceRig[Any]) -> None:
    def join(*names: str) -> None:
        for name in names:
            rig.service.welcome(Hello(role=Role.GATEWAY, peer_id=name))

    join("a", "b", "c")
    rig.service.on_peer_lost("c", Role.GATEWAY)
    rig.ask(key_tokens("process-a", 1), "a")
    assert rig.sent == [("b", key_tokens("process-a", 1))]
    rig.now_s += 2
    rig.ask(key_tokens("process-a", 2), "a")
    rig.service.on_peer_lost("a", Role.GATEWAY)
    rig.now_s += 3
    join("late")
    rig.sent.clear()
    for _ in range(2):  # the new gateway gets what it missed once
        rig.ask(key_tokens("process-late", 1), "late")
    assert [message for peer, message in rig.sent if peer == "late"] == [key_tokens("process-a", 2, age_s=3.0)]
    assert [message for peer, message in rig.sent if peer == "b"] == 2 * [key_tokens("process-late", 1)]
