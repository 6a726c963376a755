"""A request that needs images, an adapter and a guide: they come in any order, and it may end in between."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import cast

import msgspec
import pytest

from kvrelay.common.adapter_files import AdapterRef
from kvrelay.wire.messages import FailureCode, Submit
from kvrelay.worker.adapters import AdapterRefusal, AdapterStore, Take
from kvrelay.worker.entries import Phase
from kvrelay.worker.model_worker import Add
from tests.guides import tokens_guide
from tests.images import png, reader, with_images
from tests.prefill_worker.service_rig import Rig, submit

ORDERS = list(itertools.permutations(("images", "adapter", "guide")))


class PlayedAdapters:
    """Implements AdapterStore's ``acquire`` and ``release``. Answers when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Take] = []
        self.num_users = 0
        self.loaded: list[str] = []

    def acquire(self, ref: AdapterRef, take: Take) -> None:
        self.waiting.append(take)

    def release(self, ref: AdapterRef) -> None:
        assert self.num_users > 0
        self.num_users -= 1

    def load(self) -> None:
        take = self.waiting.pop()
        self.num_users += 1
        take(1)

    def refuse(self) -> None:
        self.waiting.pop()(AdapterRefusal(FailureCode.NO_ADAPTER, "it is not there"))


def asked() -> Submit:
    token_ids, images = with_images([11, 12], png(128, 128), [13])
    made, adapter = submit("a"), AdapterRef("tuned", "0" * 64)
    sampling = msgspec.structs.replace(made.sampling, guide=tokens_guide(7))
    return msgspec.structs.replace(
        made, token_ids=token_ids, num_prompt_tokens=len(token_ids), images=images, sampling=sampling, adapter=adapter
    )


def prepared() -> tuple[Rig, PlayedAdapters, dict[str, Callable[[], object]]]:
    """A worker that has been asked, and what makes each thing come."""
    rig, adapters = Rig(reader()), PlayedAdapters()
    ports = dataclasses.replace(rig.service.ports, adapters=cast("AdapterStore", adapters))
    rig.service.connect(ports)
    rig.ask(asked())
    assert len(adapters.waiting) == 1
    return rig, adapters, {"images": rig.threads.run, "adapter": adapters.load, "guide": rig.guides.answer}


def assert_nothing_kept(rig: Rig, adapters: PlayedAdapters) -> None:
    desk = rig.service.ports.images
    assert (desk._files_nbytes, desk._read_nbytes) == (0, 0)
    assert (adapters.num_users, adapters.waiting) == (0, [])
    rig.assert_nothing_left()


@pytest.mark.parametrize("order", ORDERS)
def test_a_request_is_queued_once_when_all_that_it_needs_is_there(order: tuple[str, ...]) -> None:
    rig, adapters, come = prepared()
    [entry] = rig.service.entries.values()
    for one in order:
        assert (entry.phase, rig.commands) == (Phase.COMPILING, [])
        come[one]()
    assert [type(command) for command in rig.commands] == [Add]
    rig.end("cancel")
    rig.finish()
    assert_nothing_kept(rig, adapters)


@pytest.mark.parametrize("num_before", range(4))
@pytest.mark.parametrize("order", ORDERS)
def test_what_comes_for_a_request_that_has_ended_is_not_kept(order: tuple[str, ...], num_before: int) -> None:
    rig, adapters, come = prepared()
    for one in order[:num_before]:
        come[one]()
    rig.end("cancel")
    for one in order[num_before:]:
        come[one]()
    rig.finish()
    assert rig.cancelled() == ["a"]
    assert_nothing_kept(rig, adapters)


@pytest.mark.parametrize("order", ORDERS)
def test_a_refused_adapter_ends_the_request_once(order: tuple[str, ...]) -> None:
    rig, adapters, come = prepared()
    for one in order:
        (adapters.refuse if one == "adapter" else come[one])()
    assert rig.failures() == [("a", FailureCode.NO_ADAPTER)]
    assert_nothing_kept(rig, adapters)


def test_no_guide_is_compiled_for_a_request_whose_adapter_is_refused_at_once() -> None:
    rig, adapters = Rig(reader()), PlayedAdapters()
    refusal = AdapterRefusal(FailureCode.NO_ADAPTER, "it is not there")
    adapters.acquire = lambda ref, take: take(refusal)  # type: ignore[method-assign]
    rig.service.connect(dataclasses.replace(rig.service.ports, adapters=cast("AdapterStore", adapters)))
    rig.ask(asked())
    assert rig.failures() == [("a", FailureCode.NO_ADAPTER)]
    assert not rig.guides.is_asked
    rig.threads.run()  # a thread has begun to read the images
    assert_nothing_kept(rig, adapters)
