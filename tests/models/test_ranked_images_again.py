"""Prompts with images on a decode worker of two ranks with few blocks: whoever loses its blocks is computed again, images too.

Each request has the tokens that it has alone on one rank with many blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.factory import load_engine
from kvrelay.engine.images.interface import ReadImages
from kvrelay.engine.settings import FakeSettings, KvSettings, ModelSettings
from kvrelay.engine.step.interface import Engine
from tests.decode_worker.rig import Rig

from .test_images import Prompt, prompt_of, reader_of
from .test_types import BLOCK_SIZE
from .tiny_images import save_image_model

# Tokens that see each other, with sliding windows; and three axes of positions.
KINDS = ("gemma3", "qwen3_vl")
NUM_BLOCKS = 20  # enough for any request, and not for all of them
Wish = tuple[Prompt, ReadImages, SamplingParams]


def loaded(directory: Path, num_ranks: int, num_blocks: int) -> Engine:
    """The engine of a decode worker with ``--images``. The caller closes it."""
    return load_engine(
        ModelSettings(str(directory), device="cpu", threads=num_ranks, tensor_parallel=num_ranks, dtype="float32"),
        KvSettings(num_blocks=num_blocks, block_size=BLOCK_SIZE),
        FakeSettings(),
        max_num_seqs=8,
        max_batched_tokens=512,
        decodes=True,
        reads_images=True,
        progress=lambda done, total: None,
    )


def wishes_of(reader: Any) -> dict[str, Wish]:
    """Requests with an image that fill the pool, each by itself."""
    found: dict[str, Wish] = {}
    for index, size in enumerate(((60, 33), (31, 60), (45, 45), (20, 50))):
        prompt = prompt_of(reader, (size,), index)
        num_prompt = len(prompt.token_ids)
        most = NUM_BLOCKS * BLOCK_SIZE - num_prompt - 1
        sampling = SamplingParams(max_tokens=most, temperature=float(index % 2), seed=index)
        found[f"r{index}"] = (prompt, reader.read(prompt.token_ids, num_prompt, prompt.images), sampling)
    return found


def add(rig: Rig, name: str, wish: Wish) -> None:
    prompt, read, sampling = wish
    rig.add(
        name,
        prompt.token_ids,
        sampling,
        handed_over=False,
        spans=read.spans,
        has_whole_images=read.takes_whole,
        images=read,
    )


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_compute_images_again_for_whoever_lost_its_blocks(kind: str, tmp_path: Path) -> None:
    save_image_model(kind, tmp_path)
    one, two = loaded(tmp_path, 1, 1000), loaded(tmp_path, 2, NUM_BLOCKS)
    try:
        wishes = wishes_of(reader_of(tmp_path, one))  # type: ignore[arg-type]
        alone, together = Rig(one), Rig(two, max_num_seqs=8, max_batched_tokens=64)
        for name, wish in wishes.items():
            add(alone, name, wish)
            alone.run()
            add(together, name, wish)
        together.run()
        assert (together.failed, together.lost) == ([], [])
        assert together.num_preemptions > 0
        assert together.outputs == alone.outputs
    finally:
        one.close()
        two.close()
