"""Prompts whose output must match a guide: they wait for it, and may come to their end before it is there."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from kvrelay.common.sampling import FinishReason, Guide, GuideKind
from kvrelay.wire.messages import ABOUT_GUIDE, Cancel, Cancelled, Failed, FailureCode, HandedOver, Role, Submit, Tokens
from kvrelay.worker.model_worker import Add

from ..guides import PlayedGuides, tokens_guide
from .test_service import PROMPT, Rig, submit


class GuidedRig(Rig):
    def __init__(self) -> None:
        super().__init__()
        self.guides = PlayedGuides()
        self.service.ports.guides = self.guides

    def sampled(self, name: str) -> list[int]:
        batches = [message.items for _, message in self.sent if isinstance(message, Tokens)]
        return [
            token.token_id for items in batches for item in items if item.request_id == name for token in item.tokens
        ]


def guided(name: str, *token_ids: int, output: tuple[int, ...] = (), max_tokens: int = 5) -> Submit:
    plain = submit(name, max_tokens=max_tokens)
    sampling = msgspec.structs.replace(plain.sampling, guide=tokens_guide(*token_ids))
    return msgspec.structs.replace(plain, sampling=sampling, token_ids=[*PROMPT, *output])


def test_a_prompt_waits_for_its_guide_and_its_first_token_follows_it() -> None:
    rig = GuidedRig()
    rig.ask(guided("a", 77, 5))
    rig.finish()
    assert rig.service.status().num_waiting == 1
    assert rig.service.status().num_waiting_tokens == len(PROMPT)
    assert not rig.sent
    rig.guides.answer()
    rig.finish()
    assert rig.sampled("a") == [77]
    assert rig.transfers.committed == [("a", 1)]
    rig.service.on_verified(("a", 1))
    rig.release_sends()
    assert rig.told(HandedOver) == [HandedOver(request_id="a", attempt=1)]
    rig.assert_nothing_left()


def test_a_guide_that_ends_with_the_first_token_ends_the_request() -> None:
    rig = GuidedRig()
    rig.ask(guided("a", 77))
    rig.guides.answer()
    rig.finish()
    rig.release_sends()
    [tokens] = rig.told(Tokens)
    assert isinstance(tokens, Tokens)
    assert tokens.items[0].finish_reason is FinishReason.STOP
    rig.assert_nothing_left()


def test_an_attempt_that_replays_a_lost_one_goes_on_in_its_guide() -> None:
    rig = GuidedRig()
    rig.ask(guided("a", 77, 5, 9, output=(77, 5)))
    rig.guides.answer()
    rig.finish()
    rig.release_sends()
    assert rig.sampled("a") == [9]


def test_an_output_that_the_guide_does_not_allow_is_told() -> None:
    rig = GuidedRig()
    rig.ask(guided("a", 77, 5, 9, output=(77, 6)))
    rig.guides.answer()
    assert rig.told(Failed) == [
        Failed(request_id="a", attempt=1, code=FailureCode.INVALID, detail="6 came instead of 5", about=ABOUT_GUIDE)
    ]
    rig.assert_nothing_left()


@pytest.mark.parametrize(
    ("text", "code", "detail"),
    [
        ("bad", FailureCode.INVALID, "'bad' is not a guide"),
        ("broken", FailureCode.INTERNAL, "the compiler is out of order"),
    ],
)
def test_a_guide_that_does_not_compile_is_told_with_the_reason(text: str, code: FailureCode, detail: str) -> None:
    rig = GuidedRig()
    request = guided("a", 1)
    sampling = msgspec.structs.replace(request.sampling, guide=Guide(kind=GuideKind.REGEX, text=text))
    rig.ask(msgspec.structs.replace(request, sampling=sampling))
    rig.guides.answer()
    assert rig.told(Failed) == [Failed(request_id="a", attempt=1, code=code, detail=detail, about=ABOUT_GUIDE)]
    rig.assert_nothing_left()


def test_a_worker_without_a_compiler_says_so() -> None:
    rig = Rig()
    rig.ask(guided("a", 1))
    assert rig.failures() == [("a", FailureCode.INVALID)]
    rig.assert_nothing_left()


@pytest.mark.parametrize("how", ["cancel", "deadline", "gateway lost"])
def test_what_ends_while_its_guide_compiles_is_told_once_and_its_name_is_free(how: str) -> None:
    rig = GuidedRig()
    rig.ask(msgspec.structs.replace(guided("a", 77, 5), timeout_s=5.0))
    if how == "cancel":
        rig.ask(Cancel(request_id="a", attempt=1))
    elif how == "deadline":
        rig.now_s += 6.0
        rig.service.tick()
    else:
        rig.service.on_peer_lost("gateway", Role.GATEWAY)
    assert rig.service.num_entries == 0
    rig.ask(guided("a", 9, 5))
    assert not any(isinstance(command, Add) for command in rig.commands)
    rig.guides.answer()  # to both of that name: the first hears nothing any more
    rig.finish()
    ends = rig.told(Cancelled) + rig.told(Failed)
    assert len(ends) == 1
    assert rig.sampled("a") == [9]


def test_a_dead_end_fails_its_request_alone() -> None:
    rig = GuidedRig()
    rig.ask(guided("a", -1, 5))
    rig.ask(guided("b", 8, 5))
    rig.guides.answer()
    rig.finish()
    rig.release_sends()
    [failed] = rig.told(Failed)
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.code) == ("a", FailureCode.INVALID)
    assert "instead of -1" in failed.detail
    assert rig.sampled("a") == []
    assert rig.sampled("b") == [8]


async def test_a_drain_waits_for_what_compiles() -> None:
    rig = GuidedRig()
    rig.ask(guided("a", 77))
    drain = asyncio.ensure_future(rig.service.drain())
    await asyncio.sleep(0)
    assert not drain.done()
    rig.guides.answer()
    rig.finish()
    rig.release_sends()
    await drain
    rig.assert_nothing_left()
