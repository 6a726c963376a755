"""transformers' own generation with the demo model in fp32, in this process, as the reference for a deployment's answers.

Of kvrelay's engine it uses only the noise, which defines the meaning of a seed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import regex
import torch
import transformers
from transformers import LogitsProcessorList

from kvrelay.engine.sampling.noise import uniforms

NO_TIE = 1e-4  # logits closer than this may change their order


class Reference:
    """The model and its tokenizer."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(directory)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.end_ids: list[int] = sorted({self.tokenizer.eos_token_id, self._model.generation_config.eos_token_id})

    @cached_property
    def _texts(self) -> list[str]:
        """The text of every token on its own."""
        texts: list[str] = self.tokenizer.batch_decode([[token] for token in range(len(self.tokenizer))])
        return texts

    def encode(self, text: str) -> list[int]:
        """The token ids of a text."""
        ids: list[int] = self.tokenizer(text).input_ids
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """The text of tokens, without special tokens."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """``[len(token_ids), vocab]`` fp32: row i has the logits after token i."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([token_ids])).logits[0]
        return logits

    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """Log probabilities in the shape of ``logits``."""
        return torch.log_softmax(self.logits(token_ids), dim=-1)

    def generate(self, prompt: list[int], max_tokens: int, **options: Any) -> list[list[int]]:
        """The outputs of ``generate`` without sampling, best first, each up to and including its end token.

        Fails if a decision is within ``NO_TIE``: such a test needs another prompt.
        """
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            found = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                pad_token_id=self.end_ids[0],
                return_dict_in_generate=True,
                output_scores=True,
                **{"eos_token_id": self.end_ids, **options},
            )
        if options.get("num_beams", 1) == 1:
            for scores in found.scores:
                best, second = scores[0].topk(2).values.tolist()
                assert best - second > NO_TIE, f"a tie behind {self.decode(prompt)!r}"
        else:
            scores = found.sequences_scores.tolist()
            assert all(one - other > NO_TIE for one, other in pairwise(scores)), f"{self.decode(prompt)!r}: {scores}"
        outputs: list[list[int]] = found.sequences[:, len(prompt) :].tolist()
        return [self._ended(output) for output in outputs]

    def assert_guided(self, prompt: list[int], output: list[int], pattern: str) -> None:
        """Check that each token is the likeliest that keeps a match of ``pattern`` possible, and that the first match
        ends the output."""
        logits = self.logits(prompt + output)[len(prompt) - 1 : -1]
        matcher, text = regex.compile(pattern), ""
        for row, token in zip(logits, output, strict=True):
            assert matcher.fullmatch(text) is None, f"{text!r} was complete"
            likeliest, piece = self._likeliest(row, matcher, text)
            assert token == likeliest, f"behind {text!r}"
            text += piece
        assert matcher.fullmatch(text) is not None, f"{text!r} is not complete"

    def _likeliest(self, logits: torch.Tensor, matcher: regex.Pattern[str], text: str) -> tuple[int, str]:
        """The likeliest token by ``logits`` ``[vocab]`` that keeps a match possible, and its text."""
        for token in logits.argsort(descending=True).tolist():
            piece = self._texts[token]
            if token not in self.end_ids and matcher.fullmatch(text + piece, partial=True):
                return token, piece
        raise AssertionError(f"nothing leads on from {text!r}")

    def _ended(self, output: list[int]) -> list[int]:
        ends = [index for index, token in enumerate(output) if token in self.end_ids]
        return output[: ends[0] + 1] if ends else output


class OpenAIPenalties:
    """Presence and frequency penalties of output tokens, as OpenAI's API defines them. transformers has none."""

    def __init__(self, num_prompt_tokens: int, presence: float, frequency: float) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._presence = presence
        self._frequency = frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The penalised ``scores`` ``[1, vocab]`` after ``input_ids`` ``[1, length]``."""
        counts = torch.bincount(input_ids[0, self._num_prompt_tokens :], minlength=scores.shape[-1]).float()
        return scores - self._frequency * counts - self._presence * (counts > 0)


Warper = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def assert_drawn(
    logits: torch.Tensor, prompt: list[int], output: list[int], warpers: LogitsProcessorList, *, seed: int, choice: int
) -> None:
    """Check that each token is the one that its noise selects from the distribution after transformers' ``warpers``.

    ``logits``: ``[len(output), vocab]``, one row for each drawn token. The noise is a number in [0, 1) by seed, choice
    and position. It selects the token whose interval of the cumulative distribution, in vocabulary order, contains it.
    """
    positions = np.arange(len(prompt), len(prompt) + len(output), dtype=np.uint64)
    draws = uniforms(np.full_like(positions, seed), np.full_like(positions, choice), positions)
    for index, token in enumerate(output):
        so_far = torch.tensor([prompt + output[:index]])
        warped = warpers(so_far, logits[index : index + 1].clone())[0]
        cumulative = torch.softmax(warped.double(), dim=-1).cumsum(dim=-1)
        low = 0.0 if token == 0 else float(cumulative[token - 1])
        high = float(cumulative[token])
        assert high > low, f"token {token} at {index} is filtered out"
        assert low - 1e-4 <= draws[index] <= high + 1e-4, f"token {token} at {index}: {draws[index]} is not its place"
