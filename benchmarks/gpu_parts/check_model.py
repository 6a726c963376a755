"""The whole engine against transformers in float64: random weights of the measured model's heads, and SmolLM2 if it is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch

from gpu_parts.kernel_names import Kernel
from gpu_parts.model_dir import write_model
from gpu_parts.rows import Checked
from gpu_parts.running import Context, Finding, Note
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.engine_options import EngineOptions
from kvrelay.engine.interface import StepRow
from kvrelay.engine.sequence import Sequence
from kvrelay.engine.torch_engine import TorchEngine

_LIMIT = 2e-3  # of log probabilities, float32 against float64; a wrong position or head makes tenths
_STD = 0.1  # wider than weights are: some tokens must be likelier than others
_NUM_OUTPUT = 4
_NUM_LOGPROBS = 5
_PROMPT_LENS = (5, 40, 77)
_BLOCK_SIZE = 16


def check_model(context: Context) -> Iterator[Finding]:
    """Log probabilities of what the engine generates, behind prompts that it computed in ragged chunks."""
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
    yield _checked(context, directory, "random weights")
    if context.is_dry:
        yield Note("SmolLM2 takes half a minute in float64 on a CPU: left out of a dry run")
        return
    demo = _demo()
    if demo is None:
        yield Note("SmolLM2 is not here: the converted demo model of kvrelay is not in its cache")
    else:
        yield _checked(context, demo, "SmolLM2")


def _checked(context: Context, directory: Path, case: str) -> Checked:
    options = EngineOptions(
        directory,
        directory.name,
        dtype="float32",
        device=context.device_type,
        num_blocks=64,
        max_model_len=256,
        max_num_seqs=8,
    )
    engine = TorchEngine.load(options, lambda done, total: None)
    sequences, outputs = _generate(engine, context.seed)
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds, and only this check needs it

    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).to(context.device).eval()
    worst = 0.0
    for sequence, tokens in zip(sequences, outputs, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([sequence.token_ids], device=context.device)
            logprobs = reference(ids).logits[0].double().log_softmax(-1)
        for place, token in enumerate(tokens):
            expected = logprobs[sequence.num_prompt_tokens - 1 + place]
            for token_id, logprob in ((token.token_id, token.logprob), *token.top_logprobs):
                assert logprob is not None
                worst = max(worst, abs(float(expected[token_id]) - logprob))
            # The token must have been the likeliest, or as good as that.
            worst = max(worst, float(expected.max() - expected[token.token_id]))
    return Checked(
        Kernel.MODEL, f"{case}, prompts of {_PROMPT_LENS} tokens", worst, _LIMIT, "largest error of a logprob"
    )


def _generate(engine: TorchEngine, seed: int) -> tuple[list[Sequence], list[list[SampledToken]]]:
    generator = torch.Generator().manual_seed(seed)
    sampling = SamplingParams(max_tokens=100, temperature=0.0, num_logprobs=_NUM_LOGPROBS)
    sequences: list[Sequence] = []
    for number, length in enumerate(_PROMPT_LENS):
        tokens = torch.randint(3, engine.card.vocab_size, (length,), generator=generator).tolist()
        blocks = list(range(number * 8, number * 8 + 8))  # 128 tokens
        sequences.append(Sequence(f"r{number}", 1, tokens, length, sampling, 0.0, block_table=blocks))
    outputs: list[list[SampledToken]] = [[] for _ in sequences]
    while min(len(output) for output in outputs) < _NUM_OUTPUT:
        # Two thirds of a prompt, then the rest of it beside others' single tokens.
        rows = [StepRow(one, max(1, one.num_uncomputed_tokens * 2 // 3)) for one in sequences]
        for row, output, token in zip(rows, outputs, engine.step(rows), strict=True):
            row.sequence.num_computed_tokens += row.num_tokens
            if token is not None:
                row.sequence.append(token, engine.card.max_model_len)
                output.append(token)
    return sequences, outputs


def _demo() -> Path | None:
    from kvrelay.launcher.models import models_cache  # noqa: PLC0415 - brings what a machine of kernels may lack

    found = sorted(models_cache().glob("demo-*/*/config.json"))
    return found[-1].parent if found else None
