"""Random texts over a pool with a tier below it: each block has the right bytes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from .host_rig import BLOCK, WAYS, Rig, Windows, tokens_of


class Chat:
    """Texts that go on where others have stopped, or branch off."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._texts: list[list[int]] = [[]]

    def next(self) -> list[int]:
        text = list(self._chance.choice(self._texts[-12:]))
        if self._chance.random() < 0.3:
            text = text[: self._chance.randint(0, 4) * BLOCK]
        text = [*text[: 7 * BLOCK], *tokens_of(len(self._texts), self._chance.randint(1, 3))]
        self._texts.append(text)
        return text


@pytest.mark.parametrize("windows", [(None,), (None, 6), (2, 10)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(4))
def test_random_texts_find_the_right_bytes(
    way: str, windows: Windows, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are carried out late, and the pool takes blocks in their midst."""
    chance = random.Random(seed)
    rig = Rig(windows, num_blocks=10, num_kept=chance.choice([20, 60, 200]), way=way, chance=random.Random(seed))
    chat, finish = Chat(chance), rig.tier._out._finish

    def interrupted(*args: Any) -> None:
        if chance.random() < 0.1:
            rig.compute(tokens_of(10_000 + chance.randint(0, 100), chance.randint(1, 4)))
        finish(*args)

    monkeypatch.setattr(rig.tier._out, "_finish", interrupted)
    num_found = 0
    for _ in range(150):
        text = chat.next()
        fetch = rig.tier.fetch(rig.hashes(text))
        if fetch is None or not fetch.is_done or chance.random() < 0.7:
            for _ in range(chance.randint(1, 6)):
                rig.tier.work()
        while rig.tier._returns:
            rig.tier.work()
        num_found += rig.compute(text)
        rig.blocks.check_integrity()
    rig.work()
    rig.check()
    assert num_found > 50
    assert rig.told["tokens"] > 20 * BLOCK
    assert rig.told["wrong"] == 0
    assert rig.told["missed"] > 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(4))
def test_the_thread_copies_beside_everything_else(way: str, seed: int) -> None:
    chance = random.Random(seed)
    rig = Rig((None, 6), num_blocks=10, num_kept=200, way=way, chance=random.Random(seed))
    chat, num_found = Chat(chance), 0
    rig.tier.start()
    for _ in range(150):
        text = chat.next()
        fetch = rig.tier.fetch(rig.hashes(text)) if chance.random() < 0.7 else None
        if fetch is not None and chance.random() < 0.7:
            rig.wait_until(lambda fetch=fetch: fetch.is_done)  # type: ignore[misc]
        rig.wait_until(lambda text=text: rig.has_room(len(text) // BLOCK))  # type: ignore[misc]
        num_found += rig.compute(text)
    assert not rig.tier._is_over, "the tier has failed"
    rig.tier.close()
    rig.check()
    assert num_found
    assert rig.told["wrong"] == 0
