"""Beam searches in the decode worker's service: how they are counted, what a commit must contain, and which messages are sent."""

from __future__ import annotations

import msgspec
import pytest

from kvrelay.common.sampling import FinishReason, SampledToken, SamplingParams
from kvrelay.engine.beams.search import FinishedBeam
from kvrelay.engine.step.sequence import Sequence
from kvrelay.wire.codec import Codec
from kvrelay.wire.messages import Failed, FailureCode, Offer, Submit
from kvrelay.worker.model_worker import Add, Report
from kvrelay.worker.scheduling.scheduler import Progress
from tests.decode_worker.rig import beams, expected_beams
from tests.decode_worker.service_rig import CARD, Rig, offer, submit


def search(name: str, sampling: SamplingParams) -> Submit:
    return msgspec.structs.replace(submit(name), sampling=sampling)


def offered_search(name: str, sampling: SamplingParams) -> Offer:
    return msgspec.structs.replace(offer(name, [1, 2, 3]), sampling=sampling)


def test_a_search_counts_as_all_its_beams_once_it_runs() -> None:
    rig = Rig()
    rig.ask(search("a", beams(4)))
    rig.ask(submit("b"))
    status = rig.service.status()
    assert (status.num_waiting, status.num_running) == (2, 0)
    rig.handle()
    rig.model.step()
    rig.hear()
    status = rig.service.status()
    assert (status.num_waiting, status.num_running) == (0, 5)
    rig.finish()
    assert rig.service.status().num_running == 0
    rig.assert_nothing_left()


def test_nothing_is_told_of_a_search_but_that_it_began_and_its_end() -> None:
    rig, sampling = Rig(), beams(3, 9, stops=())
    rig.ask(search("a", sampling))
    rig.finish()
    begun, ended = rig.deltas("a")
    assert (begun.tokens, begun.beams, begun.finish_reason, begun.index) == ([], None, None, 0)
    assert begun.timings is not None
    assert begun.num_cached_tokens == 0
    assert (ended.tokens, ended.timings, ended.index) == ([], None, 0)
    assert ended.beams is not None
    told = [[token.token_id for token in beam.tokens] for beam in ended.beams]
    assert told == expected_beams(list(range(6)), sampling, CARD.vocab_size)
    rig.assert_nothing_left()


def test_long_answers_that_end_in_one_step_fit_their_messages() -> None:
    """Together they would exceed the bound of a message. Then all clients of the gateway would lose their tokens of this step."""
    rig, names = Rig(), ["a", "b", "c"]
    for name in names:
        rig.ask(search(name, beams(4)))
    rig.ask(submit("stream"))
    top = tuple((900_000 + rank, -0.1) for rank in range(20))
    answer = (FinishedBeam((SampledToken(7, -0.1, top),) * 23_000, FinishReason.LENGTH, -0.1),)
    ends = [Progress((name, 1), None, FinishReason.LENGTH, 0, 0, answer) for name in names]
    rig.service.on_report(Report(progress=(*ends[:2], Progress(("stream", 1), SampledToken(5), None, 0, 0), ends[2])))
    for _, message in rig.sent:
        Codec().encode(message)
    assert all(rig.deltas(name)[0].beams for name in names)
    assert rig.output("stream") == [5]


@pytest.mark.parametrize(
    ("first", "detail"),
    [
        (SampledToken(7), "0 candidates came for the first token; a beam search needs 3 here"),
        (SampledToken(7, -0.1, ((7, -0.1), (1, -0.2), (5000, -0.3))), "the first token is 5000; it must be 0 to 999"),
    ],
)
def test_a_commit_without_candidates_ends_the_lease(first: SampledToken, detail: str) -> None:
    """A commit has no or wrong candidates for the first token. It is rejected, so that the gateway may try another worker."""
    rig = Rig()
    rejected = rig.reject(offered_search("a", beams(2)), first)
    assert rejected.code is FailureCode.INTEGRITY
    assert detail in rejected.detail
    rig.assert_nothing_left()


def test_a_failed_step_is_told_once_of_all_the_beams_of_a_search() -> None:
    rig = Rig()
    rig.ask(search("a", beams(4, stops=())))
    rig.handle()
    rig.model.step()
    rig.model.step()
    assert len(rig.scheduler.running) == 4
    rig.model.on_step_failed(RuntimeError("boom"))
    rig.hear()
    assert [message.request_id for message in rig.told(Failed) if isinstance(message, Failed)] == ["a"]
    rig.assert_nothing_left()


def test_a_search_that_was_not_taken_in_leaves_nothing() -> None:
    rig = Rig()
    rig.ask(search("a", beams(4)))
    (command,) = rig.commands
    assert isinstance(command, Add)
    rig.handle()
    sequence: Sequence = command.sequence
    rig.model.on_command_failed(command, RuntimeError("boom"))
    rig.hear()
    assert rig.scheduler.remove(sequence.key) is None
    rig.assert_nothing_left()
