"""Greedy generation by transformers in a separate process.

The process frees its weights and threads before the tested deployments start. It computes nothing with kvrelay's engine, which is
compared with it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvrelay.launcher.errors import VerifyError

T = TypeVar("T")

Question = tuple[Sequence[int], int, int]
"""A context, and two tokens that might follow."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The model that others are compared with."""

    directory: Path
    dtype: str
    device: str
    threads: int

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[tuple[int, ...]]:
        """``max_tokens`` greedy tokens of each prompt. Raises VerifyError."""
        return self._run(_generate, self, prompts, max_tokens)

    def score(self, questions: Sequence[Question]) -> list[float]:
        """For each (context, a, b): the logit of token a after the context, minus that of b. Raises VerifyError."""
        return self._run(_score, self, questions)

    def _run(self, work: Callable[..., list[T]], *arguments: Any) -> list[T]:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn, initializer=_be_quiet) as process:
            try:
                return process.submit(work, *arguments).result()
            except Exception as error:
                raise VerifyError(
                    f"transformers cannot run {self.directory}: {type(error).__name__}: {error}"
                ) from error


def _be_quiet() -> None:
    """Hide the output of libraries."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    for descriptor in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _load(reference: Reference) -> Any:
    import torch  # noqa: PLC0415 - only in the process

    from kvrelay.engine.models.hf.loading import load_transformers_config  # noqa: PLC0415
    from kvrelay.engine.models.hf.text import auto_class  # noqa: PLC0415

    torch.set_num_threads(reference.threads)
    torch.set_grad_enabled(False)
    config = load_transformers_config(reference.directory)
    model = auto_class(config).from_pretrained(
        reference.directory, config=config, dtype=getattr(torch, reference.dtype)
    )
    is_cuda = reference.device == "cuda" or (reference.device == "auto" and torch.cuda.is_available())
    return model.to("cuda" if is_cuda else "cpu").eval()


def _generate(reference: Reference, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[tuple[int, ...]]:
    import torch  # noqa: PLC0415
    from transformers import GenerationConfig  # noqa: PLC0415

    model = _load(reference)
    # Ignore the model's own settings: no sampling, no penalties, and no token that ends it early, as with ignore_eos.
    greedy = GenerationConfig(do_sample=False, max_new_tokens=max_tokens, eos_token_id=None, pad_token_id=0)
    model.generation_config = greedy
    answers: list[tuple[int, ...]] = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
        answers.append(tuple(output[0, len(prompt) :].tolist()))
        assert len(answers[-1]) == max_tokens, f"{len(answers[-1])} tokens instead of {max_tokens}"
    return answers


def _score(reference: Reference, questions: Sequence[Question]) -> list[float]:
    import torch  # noqa: PLC0415

    model = _load(reference)
    gaps: list[float] = []
    for context, ours, theirs in questions:
        logits = model(torch.tensor([context], device=model.device)).logits[0, -1].float()
        gaps.append(float(logits[ours] - logits[theirs]))
    return gaps
