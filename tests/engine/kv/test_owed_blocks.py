"""Prompts that share blocks of a window, on a worker that preempts nobody: none waits for another one's blocks."""

from __future__ import annotations

import random

import pytest

from kvrelay.common.kv_geometry import Chunk, Window
from kvrelay.engine.kv.block_manager import BlockManager, Missing
from kvrelay.engine.kv.owners import Owner, OwnerKind

from .test_block_groups import hashes, sequence


class Prompts:
    """Prompts on a worker that preempts nobody, computed in steps of up to two tokens, with blocks of one token."""

    def __init__(self, num_blocks: int, windows: tuple[Window | None, ...]) -> None:
        self.blocks = BlockManager(num_blocks, 1, lambda: 0.0, windows=windows, max_step_tokens=2)
        self.blocks.leaves_owed = True
        self.tokens: dict[Owner, list[int]] = {}
        self.computed: dict[Owner, int] = {}

    def begin(self, name: str, tokens: list[int]) -> bool:
        """Admit a prompt after its cached prefix. False if there is no room."""
        owner = sequence(name)
        given = self.blocks.allocate(owner, len(tokens), hashes(*tokens[:-1]))
        if given is not None:
            self.tokens[owner], self.computed[owner] = tokens, given.num_cached
        return given is not None

    def step(self, owner: Owner) -> bool:
        """Compute the next tokens, for which there must be blocks. Whether these were the last."""
        tokens, start = self.tokens[owner], self.computed[owner]
        end = self.computed[owner] = min(len(tokens), start + 2)
        for group in range(self.blocks.num_groups):
            num_blocks = len(self.blocks.owned_blocks(owner, group))
            assert num_blocks >= end, f"{owner} waits for block {num_blocks} of group {group}"
        for index, block_hash in enumerate(hashes(*tokens[:end])[start:], start):
            self.blocks.publish(owner, index, block_hash)
        self.blocks.slide(owner, end)
        self.blocks.check_integrity()
        return end == len(tokens)

    def end(self, owner: Owner) -> None:
        """Release a prompt's blocks, computed or not."""
        self.blocks.release(owner)
        del self.tokens[owner], self.computed[owner]


@pytest.mark.parametrize(("num_blocks", "num_at_once"), [(13, 1), (19, 1), (20, 2)])
def test_prompts_that_share_a_window_s_blocks_never_wait_for_each_other(num_blocks: int, num_at_once: int) -> None:
    """Each holds ten blocks at a time. They share seven, but slide past these one after the other."""
    prompts, prefix = Prompts(num_blocks, (8,)), list(range(16))
    assert prompts.begin("first", prefix)
    while not prompts.step(sequence("first")):
        pass
    prompts.end(sequence("first"))
    waiting, num_running = {"a": [*prefix, *[100] * 20], "b": [*prefix, *[200] * 20]}, list[int]()
    while waiting or prompts.computed:
        waiting = {name: tokens for name, tokens in waiting.items() if not prompts.begin(name, tokens)}
        num_running.append(len(prompts.computed))
        for owner in list(prompts.computed):
            if prompts.step(owner):
                prompts.end(owner)
    assert num_running[0] == num_at_once


def test_prompts_that_never_slide_past_what_they_share_need_no_room_for_that() -> None:
    prompts, prefix = Prompts(12, (None, 8)), list(range(4))
    assert prompts.begin("a", [*prefix, 100])
    assert not prompts.step(sequence("a"))
    assert not prompts.step(sequence("a"))
    assert prompts.begin("b", [*prefix, 200])
    assert prompts.blocks.num_allocatable == 0


@pytest.mark.parametrize("seed", range(20))
def test_no_prompt_of_several_windows_waits_for_others(seed: int) -> None:
    """Prompts begin with the same tokens, some more and some less of them. Computed ones keep their blocks for a while."""
    chance = random.Random(seed)
    prompts, computed = Prompts(60, (None, 3, Chunk(4), 12)), set[Owner]()
    for number in range(1, 400):
        if chance.random() < 0.3 or not prompts.computed:
            tokens = [0] * chance.randint(0, 15) + [number] * chance.randint(1, 10)
            assert prompts.begin(str(number), tokens) or prompts.computed, "a sole prompt finds no room"
            continue
        owner = chance.choice(list(prompts.computed))
        if owner in computed or chance.random() < 0.05:
            computed.discard(owner)
            prompts.end(owner)
        elif prompts.step(owner):
            computed.add(owner)


@pytest.mark.parametrize("seed", range(20))
def test_no_prompt_waits_for_blocks_that_come_back(seed: int) -> None:
    """The same on a small pool, while blocks of the common prefix come back from the tier below it."""
    chance = random.Random(seed)
    prompts, computed = Prompts(56, (None, 3, Chunk(4), 12)), set[Owner]()
    returns: dict[Owner, list[Missing]] = {}
    for number in range(1, 400):
        if chance.random() < 0.2:
            owner = Owner(OwnerKind.RETURN, str(number))
            missing = prompts.blocks.begin_return(owner, hashes(*[0] * chance.randint(1, 20)))
            if missing is not None:
                returns[owner] = missing
        elif returns and chance.random() < 0.3:
            owner, missing = returns.popitem()
            prompts.blocks.end_return(owner, [(one, frozenset()) for one in missing if chance.random() < 0.9])
        elif chance.random() < 0.3 or not prompts.computed:
            tokens = [0] * chance.randint(0, 20) + [number] * chance.randint(1, 10)
            assert prompts.begin(str(number), tokens) or prompts.computed or returns, "a sole prompt finds no room"
        else:
            owner = chance.choice(list(prompts.computed))
            if owner in computed or chance.random() < 0.05:
                computed.discard(owner)
                prompts.end(owner)
            elif prompts.step(owner):
                computed.add(owner)
        prompts.blocks.check_integrity()
