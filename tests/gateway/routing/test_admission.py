"""The queue of requests that wait for a place at workers, in virtual time."""

from __future__ import annotations

import asyncio
import re

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.common.fair_queue import Flow
from kvrelay.gateway.errors import ApiError, RequestTimeoutError, UnavailableError
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.routing.admission import Admission, Asked
from kvrelay.gateway.routing.estimates import Estimates
from kvrelay.gateway.routing.forecast import Prefiller, Supply


class Office:
    """An admission with ``num_places`` places. A request keeps its place until ``free``."""

    def __init__(self, num_places: int, max_queued: int = 100, room_timeout_s: float = 60.0) -> None:
        self.loop = asyncio.get_running_loop()
        self.changed = asyncio.Event()
        self.metrics = GatewayMetrics(CollectorRegistry()).of_model("tiny")
        self.backlog_s = 0.0  # of the one prefill worker, which computes 100 tokens a second
        estimates = Estimates(self.supply)
        self.admission = Admission(max_queued, room_timeout_s, self.changed, self.metrics, estimates, self.loop.time)
        self.num_places = num_places
        self.served: list[str] = []

    def find(self) -> str | None:
        if self.num_places == 0:
            return None
        self.num_places -= 1
        return "place"

    def free(self) -> None:
        self.num_places += 1
        self.changed.set()

    def supply(self) -> Supply:
        return Supply([Prefiller(100 * self.backlog_s, 100.0)], 0.0, free_places=100, free_tokens=1e6)

    async def serve(self, service_s: float) -> None:
        """Serve a request with an answer of ten tokens that takes ``service_s``."""
        self.num_places += 1
        asked = Asked(100, 10)
        await self.admission.place(self.find, asked, 600.0, str)
        begun_s = self.loop.time()
        await asyncio.sleep(service_s)
        self.admission.on_end(asked, 10, begun_s + service_s / 2)

    async def ask(
        self,
        name: str,
        num_tokens: int = 100,
        timeout_s: float = 600.0,
        priority: int = 0,
        key: str = "",
        is_follower: bool = False,
    ) -> str:
        asked = Asked(num_tokens, 10, num_tokens, Flow(key, priority), is_follower)
        await self.admission.place(self.find, asked, timeout_s, lambda: "no worker has room")
        self.served.append(name)
        return name

    def refused(self, reason: str) -> float:
        return (
            self.metrics.registry.get_sample_value(
                "kvrelay_refused_requests_total", {"model": "tiny", "reason": reason}
            )
            or 0
        )

    @property
    def queued(self) -> float | None:
        return self.metrics.registry.get_sample_value("kvrelay_requests_queued", {"model": "tiny"})


async def test_who_finds_a_place_does_not_wait() -> None:
    office = Office(1)
    before_s = office.loop.time()
    assert await office.ask("a") == "a"
    assert office.loop.time() == before_s


async def test_first_come_first_served() -> None:
    office = Office(0)
    tasks = [asyncio.ensure_future(office.ask(name)) for name in "abcd"]
    await asyncio.sleep(1)
    assert office.queued == 4
    for served in (1, 2, 3, 4):
        office.free()
        await asyncio.sleep(0.001)  # served at once, not at the next periodic look
        assert len(office.served) == served
    assert office.served == list("abcd")
    assert office.queued == 0
    assert [await task for task in tasks] == list("abcd")


async def test_nobody_passes_those_who_wait() -> None:
    office = Office(0)
    first = asyncio.ensure_future(office.ask("first"))
    await asyncio.sleep(1)
    office.num_places = 1  # without a notification
    second = asyncio.ensure_future(office.ask("second"))
    await asyncio.sleep(1)
    assert office.served == ["first"]
    office.free()
    await second
    await first


async def test_who_leaves_the_line_holds_nobody_up() -> None:
    office = Office(0)
    tasks = [asyncio.ensure_future(office.ask(name)) for name in "abc"]
    await asyncio.sleep(0.1)
    tasks[0].cancel()
    await asyncio.sleep(0.1)
    office.free()
    await asyncio.sleep(0.001)
    assert office.served == ["b"]
    office.free()
    assert await tasks[2] == "c"


async def test_a_full_line_refuses_at_once() -> None:
    office = Office(0, max_queued=2)
    tasks = [asyncio.ensure_future(office.ask(name)) for name in "ab"]
    await asyncio.sleep(0.1)
    before_s = office.loop.time()
    with pytest.raises(UnavailableError, match="2 requests wait already") as refusal:
        await office.ask("c")
    assert office.loop.time() == before_s
    assert refusal.value.retry_after_s == 1.0
    with pytest.raises(UnavailableError):
        office.admission.check_not_full(Flow())
    assert office.refused("queue_full") == 2
    for task in tasks:
        task.cancel()


async def test_no_place_for_too_long() -> None:
    office = Office(0, room_timeout_s=5.0)
    before_s = office.loop.time()
    with pytest.raises(UnavailableError, match="no worker has room; try again later"):
        await office.ask("a")
    assert office.loop.time() - before_s == pytest.approx(5.0)
    with pytest.raises(RequestTimeoutError, match="within the request's 2 s"):
        await office.ask("b", timeout_s=2.0)
    assert office.loop.time() - before_s == pytest.approx(7.0)
    assert (office.refused("no_place"), office.refused("timeout")) == (1, 1)


async def test_who_would_wait_too_long_is_refused_at_once_and_told_when_to_come() -> None:
    office = Office(0, room_timeout_s=30.0)
    await office.serve(1.0)
    office.backlog_s = 29.0
    tasks = [asyncio.ensure_future(office.ask("first"))]
    await asyncio.sleep(0)
    tasks.append(asyncio.ensure_future(office.ask("second")))
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match=r"in some 31 s; the limit is 30 s; try again later") as refusal:
        await office.ask("third", num_tokens=127)
    assert refusal.value.retry_after_s == pytest.approx(1.0)
    assert (office.refused("would_wait"), office.queued) == (1, 2)
    office.backlog_s = 0.0
    await asyncio.sleep(0.5)  # time for a new forecast
    tasks.append(asyncio.ensure_future(office.ask("fourth")))
    await asyncio.sleep(0)
    assert office.queued == 3
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_who_could_only_be_late_is_refused_at_once() -> None:
    office = Office(0)
    await office.serve(2.0)
    office.backlog_s = 3.0
    pattern = re.escape("waiting and answering take some 5.8 s, the request has 4 s; try again later")
    with pytest.raises(UnavailableError, match=pattern):
        await office.ask("short", timeout_s=4.0)
    assert office.refused("would_be_late") == 1
    patient = asyncio.ensure_future(office.ask("patient", timeout_s=8.0))
    await asyncio.sleep(3)
    office.free()
    assert await patient == "patient"


async def test_what_nothing_confirms_for_a_while_refuses_nobody() -> None:
    office = Office(0)
    await office.serve(100.0)
    office.backlog_s = 3.0
    with pytest.raises(UnavailableError):
        await office.ask("short", timeout_s=50.0)
    await asyncio.sleep(111)
    again = asyncio.ensure_future(office.ask("again", timeout_s=50.0))
    await asyncio.sleep(1)
    office.free()
    assert await again == "again"


async def test_whose_time_is_nearly_up_when_its_turn_comes_is_not_computed() -> None:
    office = Office(0)
    late = asyncio.ensure_future(office.ask("late", timeout_s=10.0))
    await asyncio.sleep(7)
    other = Asked(100, 10, flow=Flow(priority=-10))
    early = asyncio.ensure_future(office.admission.place(lambda: "place", other, 600.0, str))
    await early
    await asyncio.sleep(2)
    office.admission.on_end(other, 10, office.loop.time() - 1)
    office.free()
    with pytest.raises(UnavailableError, match=r"1\.0 s are left of the request's time, and an answer takes 2\.3 s"):
        await late
    assert office.refused("too_late") == 1
    assert office.served == []


async def test_errors_of_who_looks_for_a_place_leave_the_line_in_order() -> None:
    office = Office(0)

    def broken() -> str | None:
        raise ApiError("broken")

    with pytest.raises(ApiError, match="broken"):
        await office.admission.place(broken, Asked(1, 1), 600.0, str)
    waiting = asyncio.ensure_future(office.ask("a"))
    await asyncio.sleep(0.1)
    office.free()
    assert await waiting == "a"


# -- priorities ----------------------------------------------------------------------------------------------------


async def test_a_better_priority_passes_the_line_and_equal_ones_keep_their_order() -> None:
    office = Office(num_places=0)
    tasks: list[asyncio.Task[str]] = []
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", -1), ("e", 5), ("f", -1)):
        tasks.append(asyncio.ensure_future(office.ask(name, priority=priority)))
        await asyncio.sleep(0.1)
    for _ in tasks:
        office.free()
        await asyncio.sleep(1)
    await asyncio.gather(*tasks)
    assert office.served == ["d", "f", "a", "c", "b", "e"]


async def test_who_is_passed_may_run_out_of_time_and_the_line_goes_on() -> None:
    office = Office(num_places=0)
    late = asyncio.ensure_future(office.ask("late", timeout_s=2.0))
    await asyncio.sleep(0.5)
    first = asyncio.ensure_future(office.ask("first", priority=-1))
    await asyncio.sleep(3)
    with pytest.raises(RequestTimeoutError):
        await late
    office.free()
    await first
    assert office.served == ["first"]


async def test_keys_take_turns_and_a_full_line_pushes_out_who_floods_it() -> None:
    office = Office(num_places=0, max_queued=4)
    tasks = {name: asyncio.ensure_future(office.ask(name, key="flood")) for name in ("f1", "f2", "f3", "f4")}
    await asyncio.sleep(0.1)
    with pytest.raises(UnavailableError, match="4 requests wait already"):
        office.admission.check_not_full(Flow("flood"))
    office.admission.check_not_full(Flow("other"))
    tasks |= {name: asyncio.ensure_future(office.ask(name, key="other")) for name in ("o1", "o2")}
    await asyncio.sleep(0.1)
    for name in ("f3", "f4"):
        with pytest.raises(UnavailableError, match="4 requests wait already"):
            await tasks.pop(name)
    assert (office.refused("queue_full"), office.queued) == (3, 4)
    for _ in tasks:
        office.free()
        await asyncio.sleep(0.1)
    await asyncio.gather(*tasks.values())
    assert office.served == ["f1", "o1", "f2", "o2"]


async def test_who_is_already_being_answered_joins_a_full_line_and_stays_there() -> None:
    """Further choices of an answered prompt are last in the line. Newcomers are refused and pushed out, they are not."""
    office = Office(num_places=0, max_queued=2)
    newcomer = asyncio.ensure_future(office.ask("newcomer"))
    tasks: list[asyncio.Task[str]] = []
    for name in ("choice 2", "choice 3"):
        tasks.append(asyncio.ensure_future(office.ask(name, priority=5, is_follower=True)))
        await asyncio.sleep(0.1)
    assert office.queued == 3
    tasks.append(asyncio.ensure_future(office.ask("early", priority=-1)))
    with pytest.raises(UnavailableError, match="2 requests wait already"):
        await newcomer
    with pytest.raises(UnavailableError, match="2 requests wait already"):
        await office.ask("late", priority=3)
    with pytest.raises(UnavailableError):
        office.admission.check_not_full(Flow(priority=3))
    office.admission.check_not_full(Flow(priority=-2))
    for _ in tasks:
        office.free()
        await asyncio.sleep(0.1)
    await asyncio.gather(*tasks)
    assert office.served == ["early", "choice 2", "choice 3"]


async def test_a_line_of_further_choices_takes_no_newcomer() -> None:
    office = Office(num_places=0, max_queued=1)
    choice = asyncio.ensure_future(office.ask("choice", is_follower=True))
    await asyncio.sleep(0.1)
    with pytest.raises(UnavailableError):
        office.admission.check_not_full(Flow(priority=-1))
    with pytest.raises(UnavailableError):
        await office.ask("early", priority=-1)
    office.free()
    assert await choice == "choice"


async def test_who_is_already_being_answered_is_not_refused_on_an_estimate() -> None:
    office = Office(0)
    await office.serve(2.0)
    office.backlog_s = 3.0
    choice = asyncio.ensure_future(office.ask("choice", timeout_s=4.0, is_follower=True))
    await asyncio.sleep(0.1)
    office.free()
    assert await choice == "choice"
    assert office.refused("would_be_late") == 0


async def test_a_class_that_waits_for_long_gets_a_turn() -> None:
    office = Office(num_places=0)
    tasks = [asyncio.ensure_future(office.ask(name, priority=3)) for name in ("low1", "low2")]
    for number in range(8):
        tasks.append(asyncio.ensure_future(office.ask(f"high{number}")))
        await asyncio.sleep(0.5)
        office.free()
        await asyncio.sleep(0.5)
    assert [place for place, name in enumerate(office.served) if name.startswith("low")] == [4]
    for task in tasks:
        task.cancel()


async def test_who_looks_for_a_place_knows_whether_its_key_is_ahead() -> None:
    office, told = Office(num_places=3), []
    for key in ("flood", "other", "flood"):
        asked = Asked(100, 10, flow=Flow(key))

        def find(asked: Asked = asked) -> str | None:
            told.append(office.admission.is_ahead(asked))
            return office.find()

        await office.admission.place(find, asked, 600.0, str)
    assert told == [False, False, True]
