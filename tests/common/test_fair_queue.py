"""The order of requests in a fair queue: classes that age, keys that share by tokens, deadlines within a key."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from kvrelay.common.fair_queue import CREDIT_S, FairQueue, Flow, Tags, seniority


@dataclass(eq=False)
class Request:
    name: str
    flow: Flow = field(default_factory=Flow)
    num_tokens: float = 100.0
    arrival_s: float = 0.0
    deadline_s: float = math.inf
    tags: Tags = field(default_factory=Tags)
    began_s: float = math.nan


def turns(queue: FairQueue, requests: Sequence[Request], now_s: float = 0.0) -> str:
    """The names of all requests in the order in which they are served."""
    for request in requests:
        queue.come(request)
    line, served = list(requests), ""
    while line:
        first = queue.in_order(line, now_s)[0]
        queue.begin(first, now_s)
        line.remove(first)
        served += first.name
    return served


def of(key: str, names: str, **facts: float) -> list[Request]:
    flow = Flow(key, weight=facts.pop("weight", 1.0))
    arrival_s = facts.pop("arrival_s", 0.0)
    return [Request(name, flow, arrival_s=arrival_s + place / 100, **facts) for place, name in enumerate(names)]


def test_without_keys_the_order_is_that_of_arrival() -> None:
    requests = [Request(name, num_tokens=n, arrival_s=n, deadline_s=9 - n) for n, name in enumerate("abcd", 1)]
    assert turns(FairQueue(), requests) == "abcd"


def test_keys_take_turns_whatever_each_has_sent() -> None:
    assert turns(FairQueue(), [*of("flood", "fghijk"), *of("other", "ab")]) == "fagbhijk"


def test_keys_share_by_tokens() -> None:
    assert turns(FairQueue(), [*of("long", "LM", num_tokens=300.0), *of("short", "abcdef")]) == "LabcMdef"


def test_a_weight_of_two_is_twice_the_tokens() -> None:
    assert turns(FairQueue(), [*of("two", "ABCD", weight=2.0), *of("one", "ab")]) == "AaBbCD"


def serve(queue: FairQueue, requests: Sequence[Request]) -> None:
    """Serve one request a second, each as it arrives."""
    for second, request in enumerate(requests):
        request.arrival_s = float(second)
        queue.come(request)
        queue.begin(request, float(second))


def test_who_comes_late_does_not_pay_for_others_and_has_saved_up_its_share_of_the_credit() -> None:
    queue, flood = FairQueue(), of("flood", "fghijklmnop")
    serve(queue, flood[:10])  # whose start tags are 0 to 900
    late = [Request(name, Flow("other"), arrival_s=10.0) for name in "abcd"]
    last = Request("p", Flow("flood"), arrival_s=10.0)
    for request in [last, *late]:
        queue.come(request)
    assert CREDIT_S == 2.0, "the virtual time of two seconds before is 800"
    assert "".join(one.name for one in queue.in_order([last, *late], 10.0)) == "abpcd"


def test_a_key_that_had_as_much_as_any_is_ahead_while_others_ask() -> None:
    queue = FairQueue()
    serve(queue, of("flood", "fgh"))
    (again,) = of("flood", "i", arrival_s=3.0)
    queue.come(again)
    assert not queue.is_ahead(again, 3.0), "nobody else asks"
    other = Request("o", Flow("other"), arrival_s=3.0)
    queue.come(other)
    assert not queue.is_ahead(other, 3.0), "it has had nothing"
    queue.begin(other, 3.0)
    assert queue.is_ahead(again, 3.0)
    assert not queue.is_ahead(again, 64.0), "nobody else asks any more"
    queue.begin(again, 4.0)
    assert queue.is_ahead(again, 64.0), "one that has begun stays what it was"
    assert not queue.is_ahead(other, 4.0)


def test_without_keys_nobody_is_ahead() -> None:
    queue = FairQueue()
    serve(queue, of("", "abc"))
    (again,) = of("", "d", arrival_s=3.0)
    queue.come(again)
    assert not queue.is_ahead(again, 3.0)


def test_an_answer_that_is_shorter_than_expected_is_paid_back() -> None:
    queue = FairQueue()
    first = Request("f", Flow("a"), 1000.0)
    turns(queue, [first, Request("x", Flow("b"))])
    queue.settle(first, 50.0)
    assert turns(queue, [*of("a", "a"), *of("b", "b")]) == "ab"


def test_within_a_key_the_earliest_deadline_is_first() -> None:
    requests = [Request(name, Flow("key"), deadline_s=at_s) for name, at_s in (("a", 9.0), ("b", 3.0), ("c", 5.0))]
    assert turns(FairQueue(), requests) == "bca"


def test_a_class_that_is_passed_over_for_long_gets_a_turn_and_no_more() -> None:
    queue = FairQueue()
    low = [Request(name, Flow(priority=10)) for name in "lmn"]
    for request in low:
        queue.come(request)
    line, served = low, ""
    for second in range(25):  # one turn a second, while a request of a better class always waits
        better = Request("-", arrival_s=second)
        queue.come(better)
        line = queue.in_order([*line, better], float(second))
        queue.begin(line[0], float(second))
        served += line.pop(0).name
    assert [place for place, name in enumerate(served) if name in "lmn"] == [11, 23]


def test_who_was_taken_back_is_the_first_of_its_flow_and_pays_once() -> None:
    queue = FairQueue()
    first, second, third = of("a", "abc")
    other = Request("o", Flow("other"), arrival_s=1.0)
    assert turns(queue, [first, second]) == "ab"
    for request in (third, other):
        queue.come(request)
    assert queue.in_order([third, other, second], 0.0) == [other, second, third]
    queue.begin(second, 0.0)
    assert turns(queue, [third]) == "c"
    assert third.tags.start == 200.0


def test_of_lower_classes_the_younger_give_way_first_and_age_makes_up_for_class() -> None:
    old_low, low, high = (
        Request("old", Flow(priority=10)),
        Request("low", Flow(priority=10), arrival_s=15.0),
        Request("high", arrival_s=20.0),
    )
    assert sorted([high, low, old_low], key=seniority) == [old_low, high, low]


@pytest.mark.parametrize(
    ("flow", "problem"),
    [
        (Flow("k", 5, 0.5), None),
        (Flow(weight=0.0), "flow.weight is 0.0; it must be 0.001 to 1000"),
        (Flow(weight=math.nan), "flow.weight is nan; it must be 0.001 to 1000"),
        (Flow(priority=-2001), "flow.priority is -2001; it must be -2000 to 2000"),
    ],
)
def test_what_workers_refuse(flow: Flow, problem: str | None) -> None:
    assert flow.problem() == problem


@pytest.mark.parametrize("seed", range(2))
def test_nobody_waits_more_than_four_times_its_fair_share(seed: int) -> None:
    """One worker serves ten keys of several weights, of which one floods. A request may wait four times its fair time.

    The fair time is that on a server for the key alone, with the key's share of the speed.
    """
    chance = random.Random(seed)
    weights = {f"k{number}": chance.choice((1.0, 1.0, 2.0, 4.0)) for number in range(10)}
    speed, total = 1000.0, sum(weights.values())
    requests = []
    for key, weight in weights.items():
        load, at_s = (8.0 if key == "k0" else chance.uniform(0.3, 1.2)), 0.0
        while (at_s := at_s + chance.expovariate(load * speed * weight / total / 100)) < 30:
            requests.append(Request(key, Flow(key, weight=weight), chance.uniform(20, 180), at_s))
    requests.sort(key=lambda one: one.arrival_s)
    coming, queue, line, now_s = list(requests), FairQueue(), [], 0.0
    while coming or line:
        while coming and coming[0].arrival_s <= now_s:
            queue.come(coming[0])
            line.append(coming.pop(0))
        if not line:
            now_s = coming[0].arrival_s
            continue
        first = queue.in_order(line, now_s)[0]
        queue.begin(first, now_s)
        line.remove(first)
        now_s += first.num_tokens / speed
        first.began_s = now_s
    largest_s = 180 / speed * len(weights)  # a request waits for one request of each other key at most
    free_s = dict.fromkeys(weights, 0.0)
    for one in requests:
        key = one.flow.key
        share = speed * weights[key] / total
        free_s[key] = max(free_s[key], one.arrival_s) + one.num_tokens / share
        assert one.began_s - one.arrival_s <= max(4 * (free_s[key] - one.arrival_s), largest_s)
