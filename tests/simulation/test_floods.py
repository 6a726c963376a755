"""A flood from one API key hardly delays the others, whichever gateway it comes by."""

from __future__ import annotations

from .floods import FLOOD, OTHERS, OTHERS_ALONE, run

SECONDS = 5.0


def test_keys_keep_a_flood_out_of_the_others_way() -> None:
    clients = [*OTHERS_ALONE, FLOOD]
    alone = run(OTHERS_ALONE, SECONDS)
    as_one_key, with_keys = (run(clients, SECONDS, has_keys=has_keys) for has_keys in (False, True))
    # A worker that always computes has larger steps under way, which whoever comes waits for.
    assert with_keys.ttft_s(OTHERS) < 5 * alone.ttft_s(OTHERS)
    assert with_keys.ttft_s(OTHERS) < as_one_key.ttft_s(OTHERS) / 4  # in five seconds; the longer the flood, the less
    assert with_keys.ttft_s(["flood"]) < 1.2 * as_one_key.ttft_s(["flood"])  # it gets all that is left
