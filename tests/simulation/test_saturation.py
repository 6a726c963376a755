"""Hand-offs come faster than a decode worker generates. A request that the decode worker prefills itself still finishes.

A real gateway holds back requests that a worker has no place for. The gateway here sends as many as the workers take.
"""

from __future__ import annotations

import pytest

from kvrelay.common.sampling import SamplingParams
from kvrelay.wire.control.client import ControlClient
from kvrelay.wire.messages import (
    DecodeTarget,
    Failed,
    Hello,
    HelloRefused,
    Message,
    Role,
    Submit,
    Tokens,
    Welcome,
)
from kvrelay.wire.metrics import WireMetrics

from .clock import Process
from .machines import LINKS, VOCAB
from .members import Member
from .threads import sim_network
from .world import World, running

NUM_IN_FLIGHT = 32  # handed-over requests at a time


class Flood:
    """A gateway that replaces each request that ends by a new one. Implements ClientHandler for the links to all workers."""

    def __init__(self, world: World, prompt_len: int, max_tokens: int) -> None:
        """``prompt_len`` and ``max_tokens`` are those of the requests of the flood."""
        self._prompt_len, self._max_tokens = prompt_len, max_tokens
        self.num_tokens: dict[str, int] = {}  # output tokens, by request
        self.finished: list[str] = []
        self._requests: dict[str, tuple[str, Submit]] = {}
        self._world = world
        self._member = world.members["flood"] = Member(Process("flood.1", world.loop))
        self._clients: dict[str, ControlClient] = {}
        world.loop.call_soon(self._boot, context=self._member.process.context)
        world.advance(0.1)
        for _ in range(NUM_IN_FLIGHT):
            world.loop.call_soon(self._feed, context=self._member.process.context)
        world.advance(0.3)

    def _boot(self) -> None:
        network, metrics = sim_network(self._world.wires), WireMetrics(self._member.registry)
        for name in (*self._world.prefill_names, "d0"):
            hello = Hello(role=Role.GATEWAY, peer_id="flood")
            self._clients[name] = ControlClient(f"tcp://{name}:1", hello, self, LINKS, metrics=metrics, network=network)
            self._clients[name].start()

    def local(self, name: str, prompt: list[int], max_tokens: int) -> None:
        """Send a request that the decode worker prefills itself."""
        self._world.loop.call_soon(
            lambda: self._submit("d0", name, prompt, max_tokens), context=self._member.process.context
        )

    def _feed(self) -> None:
        """Send one more request to a prefill worker."""
        number = len(self._requests)
        prompt = [number % VOCAB, number // VOCAB, *range(self._prompt_len - 2)]
        prefills = self._world.prefill_names
        self._submit(prefills[number % len(prefills)], f"flood{number}", prompt, self._max_tokens)

    def _submit(self, worker: str, name: str, prompt: list[int], max_tokens: int) -> None:
        submit = Submit(
            request_id=name,
            attempt=1,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            decode=None if worker == "d0" else DecodeTarget(address="tcp://d0:1"),
        )
        self._requests[name] = (worker, submit)
        self.num_tokens[name] = 0
        self._clients[worker].send(submit)

    def on_message(self, message: Message) -> None:
        match message:
            case Tokens(items=items):
                for item in items:
                    self.num_tokens[item.request_id] = item.index + len(item.tokens)
                    if item.finish_reason is not None:
                        self.finished.append(item.request_id)
                        if item.request_id.startswith("flood"):
                            self._feed()
            case Failed(request_id=name) if name.startswith("flood"):
                self._feed()
            case Failed(request_id=name):  # the worker's queue is full: send it again until it is taken
                worker, submit = self._requests[name]
                self._clients[worker].send(submit)
            case _:
                pass

    def on_welcome(self, welcome: Welcome) -> None:
        pass

    def on_lost(self, reason: str) -> None:
        raise AssertionError(reason)

    def on_refused(self, refused: HelloRefused) -> None:
        raise AssertionError(refused.detail)


def num_served_before(flood: Flood, world: World, name: str) -> int:
    """Counts the handed-over requests that finish between the moment d0 takes request ``name`` and its end."""
    worker = world.members["d0"].worker
    assert worker is not None
    assert world.until(lambda: f"{name}/1" in worker.service.debug(), 20.0), f"{name} is not taken"
    num_before = len(flood.finished)
    is_over = world.until(lambda: name in flood.finished, 20.0)
    assert is_over, f"{name} has {flood.num_tokens[name]} tokens, others go on"
    return sum(one.startswith("flood") for one in flood.finished[num_before:])


@pytest.mark.parametrize(
    ("num_blocks", "hand_over", "local"),
    [
        pytest.param(200, (3, 20), (3, 4), id="a place"),
        pytest.param(28, (5, 16), (60, 4), id="blocks"),
        pytest.param(28, (5, 16), (20, 60), id="blocks after a preemption"),
    ],
)
def test_who_is_computed_here_waits_for_no_hand_over_that_comes_later(
    num_blocks: int, hand_over: tuple[int, int], local: tuple[int, int]
) -> None:
    """``hand_over`` and ``local`` are the numbers of (prompt, output) tokens of the flood's requests and of the local one."""
    num_preemptions = 0.0
    for seed in (1, 2):
        with running(seed, num_prefills=4, num_decodes=1, num_gateways=0, num_blocks=num_blocks) as world:
            flood = Flood(world, *hand_over)
            num_prompt, num_output = local
            flood.local("local", [900 - place for place in range(num_prompt)], num_output)
            # At most the requests before it finish, and those that run beside it in the other two places.
            assert num_served_before(flood, world, "local") <= NUM_IN_FLIGHT + 2 * num_output // hand_over[1]
            num_preemptions += world.count("kvrelay_preemptions_total")
            assert not world.problems
    assert (num_preemptions > 0) == (local[1] > hand_over[1])
