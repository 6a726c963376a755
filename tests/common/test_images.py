"""Images in prompts: their spans, and what they do to block hashes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvrelay.common.block_hash import HashChain
from kvrelay.common.images import ImageSpan, image_digest, spans_problem

FINGERPRINT = bytes(16)
BLOCK_SIZE = 4
TOKENS = list(range(18))  # four full blocks, and a half one
CAT, DOG = image_digest(b"cat"), image_digest(b"dog")


def hashes(*spans: ImageSpan, tokens: list[int] = TOKENS) -> list[bytes]:
    return HashChain(FINGERPRINT, BLOCK_SIZE, images=spans).hashes_of_all(tokens)


@dataclass(frozen=True)
class Case:
    spans: tuple[ImageSpan, ...]
    problem: str | None


@pytest.mark.parametrize(
    "case",
    [
        Case((), None),
        Case((ImageSpan(0, 3, CAT), ImageSpan(3, 10, CAT)), None),
        Case((ImageSpan(0, 4, CAT), ImageSpan(3, 10, CAT)), "image 1 has tokens 3 to 10; they must lie in 4 to 10"),
        Case((ImageSpan(2, 2, CAT),), "image 0 has tokens 2 to 2"),
        Case((ImageSpan(-1, 2, CAT),), "image 0 has tokens -1 to 2"),
        Case((ImageSpan(5, 11, CAT),), "image 0 has tokens 5 to 11; they must lie in 0 to 10"),
        Case((ImageSpan(0, 3, CAT[:8]),), "image 0 has a digest of 8 bytes; it must have 16"),
    ],
)
def test_spans(case: Case) -> None:
    problem = spans_problem(case.spans, 10)
    assert problem == case.problem or (case.problem is not None and problem is not None and case.problem in problem)


def test_an_image_changes_the_hashes_from_its_first_block_on() -> None:
    plain, cat, dog = hashes(), hashes(ImageSpan(5, 13, CAT)), hashes(ImageSpan(5, 13, DOG))
    assert cat[0] == dog[0] == plain[0]
    for place in range(1, 5):
        assert len({plain[place], cat[place], dog[place]}) == 3


def test_a_second_image_leaves_the_blocks_before_it() -> None:
    first = ImageSpan(1, 4, CAT)
    alone, both = hashes(first), hashes(first, ImageSpan(12, 15, DOG))
    assert alone[:3] == both[:3]
    assert alone[3] != both[3]


def test_order_and_number_of_images_in_a_block_count() -> None:
    tail = [7]  # one token in the last block, where a digest could be taken for four
    found = {
        hashes(*(ImageSpan(place, place + 1, digest) for place, digest in enumerate(digests)), tokens=tail)[0]
        for digests in ((), (CAT,), (DOG,), (CAT, CAT), (CAT, DOG), (DOG, CAT))
    }
    assert len(found) == 6


def test_a_copy_knows_the_images() -> None:
    chain = HashChain(FINGERPRINT, BLOCK_SIZE, images=[ImageSpan(13, 15, CAT)])
    chain.hashes(TOKENS, 1)
    assert chain.copy().hashes_of_all(TOKENS) == hashes(ImageSpan(13, 15, CAT))
