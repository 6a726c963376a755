"""How long a prompt keeps its place at a decode worker while it is taken back from a prefill worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvrelay.common.sampling import SamplingParams
from kvrelay.gateway.relay.request import GenerationRequest, Place, RequestTimings
from kvrelay.gateway.relay.taking_back import TakingBack
from kvrelay.gateway.routing.ways import Reason
from kvrelay.gateway.workers.load import Load

from ...simulation.clock import SimLoop

ATTEMPT = ("r", 1)


@pytest.fixture
def loop() -> Iterator[SimLoop]:
    loop = SimLoop(1)
    yield loop
    loop.close()


class Asking:
    """A prompt of a hundred tokens waits at a prefill worker, and a decode worker would compute it sooner."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.decode_load = Load(16)
        prefill: Any = SimpleNamespace(client=SimpleNamespace(send=lambda message: self.sent.append(message) is None))
        place = Place(None, cast(Any, "decode worker"), Reason.TAKEN_BACK, num_to_compute=100)
        request = GenerationRequest("r", [0] * 100, SamplingParams(max_tokens=1), RequestTimings(0.0))
        self.taking_back = TakingBack(cast(Any, self), request, ATTEMPT, prefill, lambda *_: place)

    # -- the pool --------------------------------------------------------------------------------------------------

    def keep_place(self, key: tuple[str, int], worker: object, num_tokens: int, num_to_compute: int) -> None:
        self.decode_load.open(key, num_tokens, 0.0, is_sent=False, num_to_compute=num_to_compute)

    def give_place_back(self, key: tuple[str, int], worker: object) -> None:
        self.decode_load.close(key, 0)


@pytest.mark.parametrize(("after_s", "num_kept"), [(0.4, 0), (0.6, 1), (1.4, 1), (1.6, 0), (60.0, 0)])
def test_a_prefill_worker_that_does_not_answer_keeps_no_place_for_long(
    loop: SimLoop, after_s: float, num_kept: int
) -> None:
    async def story() -> None:
        asking = Asking()
        await asyncio.sleep(after_s)
        assert len(asking.sent) == (after_s > 0.5), "it is asked once"
        assert asking.decode_load.num_requests == num_kept
        asking.taking_back.end()
        assert asking.decode_load.num_requests == 0

    loop.run_until_complete(story())
