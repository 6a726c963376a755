"""Checks the engine against transformers in float64, with random weights and the heads of the measured model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path

import torch

from gpu_parts.engine.model_dir import write_model
from gpu_parts.frame.rows import Checked, Kernel
from gpu_parts.frame.running import Context, Finding
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.backends.options import EngineOptions
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.leader import Leader
from kvrelay.engine.step.plan import RowResult
from kvrelay.engine.step.sequence import Sequence
from kvrelay.engine.torch_engine import TorchEngine

_LIMIT = 2e-3  # for log probabilities, float32 against float64; a wrong position or head gives tenths
_BF16_LIMIT = 0.02
_OF_TORCHS_ERROR = 3.0  # the engine's bfloat16 error may be this many times that of transformers
_STD = 0.1  # wider than real weights, so that some tokens are likelier than others
_NUM_OUTPUT = 4
_NUM_AHEAD = 6
_NUM_LOGPROBS = 5
_PROMPT_LENS = (5, 40, 77)
_BLOCK_SIZE = 16


def check_model(context: Context) -> Iterator[Finding]:
    """Check the log probabilities of generated tokens, after prompts that were computed in ragged chunks."""
    shape = dataclasses.replace(
        context.sizes.shape,
        vocab_size=min(2048, context.sizes.shape.vocab_size),
        hidden_size=min(512, context.sizes.shape.hidden_size),
        intermediate_size=min(1024, context.sizes.shape.intermediate_size),
        num_layers=2,
        max_positions=512,
        dtype="float32",
    )
    directory = context.work / "small-model"
    if not directory.exists():
        write_model(directory, shape, context.generator(), _STD)
    yield from _checked(context, directory)


def _checked(context: Context, directory: Path) -> Iterator[Checked]:
    """Check float32 step by step and then run ahead, and the same in bfloat16 relative to torch's own error."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds, and only this check needs it

    def answer(ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = models[dtype](ids).logits[0]
        return logits.double().log_softmax(-1)

    models = {
        dtype: AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(context.device).eval()
        for dtype in (torch.float64, torch.bfloat16)
    }
    for dtype in ("float32", "bfloat16"):
        sequences, outputs = _generate(_engine(context, directory, dtype), context.seed)
        stepped: list[float] = []
        ahead: list[float] = []
        torchs = 0.0
        for sequence, tokens in zip(sequences, outputs, strict=True):
            ids = torch.tensor([sequence.token_ids], device=context.device)
            expected = answer(ids, torch.float64)[sequence.num_prompt_tokens - 1 :]
            stepped.append(largest_error(expected, tokens[:-_NUM_AHEAD]))
            ahead.append(largest_error(expected[len(tokens) - _NUM_AHEAD :], tokens[-_NUM_AHEAD:]))
            if dtype == "bfloat16":
                theirs = answer(ids, torch.bfloat16)[sequence.num_prompt_tokens - 1 :]
                likeliest = expected.topk(_NUM_LOGPROBS).indices
                torchs = max(torchs, float((expected - theirs).gather(1, likeliest).abs().max()))
        limit = _LIMIT if dtype == "float32" else max(_BF16_LIMIT, _OF_TORCHS_ERROR * torchs)
        for way, errors in (("step by step", stepped), ("run ahead", ahead)):
            case = f"{dtype}, {way}, prompts of {_PROMPT_LENS} tokens"
            yield Checked(Kernel.MODEL, case, _worst(errors), limit, "largest error of a logprob")


def largest_error(expected: torch.Tensor, tokens: Seq[SampledToken]) -> float:
    """The largest error of log probabilities of greedy ``tokens``. ``expected`` ``[len(tokens) or more, vocab]`` float64."""
    errors: list[float] = []
    for row, token in zip(expected, tokens, strict=False):
        for token_id, logprob in ((token.token_id, token.logprob), *token.top_logprobs):
            assert logprob is not None
            errors.append(abs(float(row[token_id]) - logprob))
        # The token must be the likeliest, or nearly so.
        errors.append(float(row.max() - row[token.token_id]))
    return _worst(errors)


def _worst(errors: Seq[float]) -> float:
    """The largest of at least one error, or NaN if one is NaN, which Python's ``max`` may ignore."""
    return float(torch.tensor(errors, dtype=torch.float64).max())


def _engine(context: Context, directory: Path, dtype: str) -> TorchEngine:
    options = EngineOptions(
        directory,
        directory.name,
        dtype=dtype,
        device=context.device_type,
        cpu_kernels="torch",
        num_blocks=64,
        max_model_len=256,
        max_num_seqs=8,
    )
    return TorchEngine.load(options, lambda done, total: None)


def _generate(engine: TorchEngine, seed: int) -> tuple[list[Sequence], list[list[SampledToken]]]:
    """Sequences and their output tokens. Steps for the last ``_NUM_AHEAD`` tokens are launched while the previous one runs."""
    generator = torch.Generator().manual_seed(seed)
    sampling = SamplingParams(max_tokens=100, temperature=0.0, num_logprobs=_NUM_LOGPROBS)
    sequences: list[Sequence] = []
    for number, length in enumerate(_PROMPT_LENS):
        tokens = torch.randint(3, engine.card.vocab_size, (length,), generator=generator).tolist()
        blocks = list(range(number * 8, number * 8 + 8))  # 128 tokens
        sequences.append(Sequence(f"r{number}", 1, tokens, length, sampling, 0.0, block_tables=[blocks]))
    outputs: dict[Sequence, list[SampledToken]] = {one: [] for one in sequences}

    leader = Leader(engine)

    def take(rows: Seq[StepRow], results: Seq[RowResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            row.sequence.num_computed_tokens += row.num_tokens
            for token in result.tokens:
                row.sequence.append(token, engine.card.max_model_len)
                outputs[row.sequence].append(token)

    while min(len(output) for output in outputs.values()) < _NUM_OUTPUT:
        # Two thirds of a prompt, then its rest together with single tokens of other sequences.
        rows = [StepRow(one, max(1, one.num_uncomputed_tokens * 2 // 3)) for one in sequences]
        take(rows, leader.step(rows))
    rows = [StepRow(one, 1) for one in sequences]
    launched = leader.launch(rows)
    for _ in range(_NUM_AHEAD - 1):
        behind = [StepRow(one, 1, num_ahead=1) for one in sequences]
        following = leader.launch(behind, behind=launched)
        take(rows, launched.wait())
        rows, launched = behind, following
    take(rows, launched.wait())
    return sequences, list(outputs.values())
