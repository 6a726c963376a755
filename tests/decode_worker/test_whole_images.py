"""Images that one step must compute whole, on a decode worker: they get a step, and keep nobody waiting."""

from __future__ import annotations

from kvrelay.common.images import ImageSpan
from kvrelay.engine.fake.engine import FakeEngine, FakePace, fake_card
from kvrelay.engine.fake.language import expected_output
from tests.decode_worker.rig import Rig, greedy
from tests.images import PLACEHOLDER


def whole(rig: Rig, name: str, *lengths: int, max_tokens: int = 4) -> list[int]:
    """Add a prompt with images of so many tokens, each computed whole. Returns its output."""
    token_ids, spans = [11, 12], list[ImageSpan]()
    for number, length in enumerate(lengths):
        spans.append(ImageSpan(len(token_ids), len(token_ids) + length, bytes([number]) * 16))
        token_ids += [PLACEHOLDER] * length + [14, 15]
    sampling = greedy(max_tokens)
    rig.add(name, token_ids, sampling, handed_over=False, spans=spans, reads_images=True, has_whole_images=True)
    return expected_output(token_ids, max_tokens, 1000, images=spans)


def busy_rig(**settings: int | float) -> Rig:
    """A worker whose steps have room for 8 tokens of prompts, beside a sequence that generates."""
    engine = FakeEngine(fake_card(num_blocks=256), has_whole_images=True, runs_ahead=True, reads_back_once=True)
    rig = Rig(engine, max_num_seqs=8, itl_budget_ms=0.001, pace=FakePace(0.001, 0.001), **settings)
    rig.add("busy", [1, 2, 3], greedy(400))
    rig.add("text", list(range(40)), greedy(2), handed_over=False)
    while "text" not in rig.ends or len(rig.outputs["busy"]) < 40:
        rig.step()
    return rig


def steps_of(rig: Rig, name: str) -> list[int]:
    """The tokens of each of the prompt's chunks."""
    return [num_tokens for rows in rig.engine.rows for one, num_tokens in rows if one == name and num_tokens > 1]


def test_an_image_larger_than_its_share_of_a_step_is_computed_whole() -> None:
    rig = busy_rig(max_batched_tokens=48)
    outputs = {"first": whole(rig, "first", 40, 12), "second": whole(rig, "second", 3, 40)}
    rig.add("behind", list(range(100, 130)), greedy(1), handed_over=False)
    rig.run()
    assert rig.outputs["behind"] == expected_output(list(range(100, 130)), 1, 1000)
    assert {name: rig.outputs[name] for name in outputs} == outputs
    assert all(40 in steps_of(rig, name) for name in outputs)
    assert max(sum(num_tokens for _, num_tokens in rows) for rows in rig.engine.rows) <= 48
    assert rig.failed == []


def test_short_prompts_do_not_keep_an_image_waiting() -> None:
    """They overtake a long prompt, but not before its next image, which needs the room of a whole step."""
    rig = busy_rig(max_batched_tokens=64)
    output = whole(rig, "long", 20, 20, 20, 20)
    for number in range(60):
        if "long" in rig.ends:
            break
        rig.add(f"short{number}", [5, 6, number], greedy(1), handed_over=False)
        rig.step()
    assert rig.outputs["long"] == output
    rig.run()


def test_an_overtaking_prompt_takes_no_more_than_its_share() -> None:
    """Its image waits for the prompt that it would overtake, which is not computed later for it."""
    rig = busy_rig(max_batched_tokens=64)
    rig.add("long", list(range(200)), greedy(1), handed_over=False)
    rig.step()
    output = whole(rig, "imaged", 40)
    rig.run()
    assert rig.outputs["imaged"] == output
    chunks = [dict(rows) for rows in rig.engine.rows]
    last = max(place for place, rows in enumerate(chunks) if "long" in rows)
    assert all(rows["imaged"] <= 4 for rows in chunks[: last + 1] if "imaged" in rows)
