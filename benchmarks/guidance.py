"""The cost of guided decoding: a decode step of 16 guided rows against one of 16 free rows, in turns, and the time to compile.

    .venv/bin/python benchmarks/guidance.py            # about 3 minutes

Both batches use the demo model in one process, with the same prompts and lengths. A step includes all work of the model thread:
masks, the model, sampling, and updating the grammar. A round is one step of each batch, in alternating order. The result is the
median of the rounds' ratios, for wall time and for the process's CPU time. The latter includes masks that other threads make. Two
batches without a guide come first and show the machine's noise. A finished output starts again after its prompt. Greedy rows are
the hardest case, because they cost almost nothing to sample without a guide. Run it on an idle machine.
"""

from __future__ import annotations

import json
import queue
import statistics
import sys
import time
from dataclasses import dataclass, field, replace

import click

from kvrelay.common.sampling import Guide, GuideKind, SamplingParams
from kvrelay.engine.backends.options import EngineOptions
from kvrelay.engine.guides.compiler import GrammarCompiler
from kvrelay.engine.guides.guidance import GuideRefusal, GuideResult
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.leader import Leader
from kvrelay.engine.step.sequence import GuideState, Sequence, SequenceStatus
from kvrelay.engine.torch_engine import TorchEngine
from kvrelay.gateway.chat.tools.call_grammar import tool_guide
from kvrelay.gateway.chat.tools.formats.families import FAMILIES
from kvrelay.gateway.chat.tools.functions import parse_tool_choice, parse_tools
from kvrelay.launcher.models import resolve_model

_PROMPT_LEN = 64
_MAX_LEN = 256
_END = 2  # the demo model's end of text
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 4, "maxItems": 12},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
        },
    },
    "required": ["name", "age", "tags", "address"],
}
_GUIDES = {
    "any JSON object": Guide(kind=GuideKind.JSON_OBJECT),
    "a schema of 6 fields": Guide(kind=GuideKind.JSON_SCHEMA, text=json.dumps(_PERSON)),
    "a regular expression": Guide(kind=GuideKind.REGEX, text=r"([A-Z][a-z]+,? )*end\."),
    "a regular expression, counts within counts": Guide(kind=GuideKind.REGEX, text=r"([A-Z][a-z]{2,9} ){20,60}end\."),
    "a grammar (EBNF)": Guide(
        kind=GuideKind.GRAMMAR,
        text='root ::= line{20,60}\nline ::= word ("+" word)* "\\n"\nword ::= [a-z]+ | [0-9]+ | "(" word ")"',
    ),
    "a schema with a maxLength of 300": Guide(
        kind=GuideKind.JSON_SCHEMA, text='{"type": "string", "minLength": 250, "maxLength": 300}'
    ),
}
_TOOLS = [
    {"type": "function", "function": {"name": "find_person", "parameters": _PERSON}},
    {"type": "function", "function": {"name": "end_call", "parameters": {"type": "object", "properties": {}}}},
]


@dataclass
class Batch:
    """Sequences that decode together without end."""

    leader: Leader
    compiler: GrammarCompiler
    guide: Guide | None
    sequences: list[Sequence] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    step_cpu_s: list[float] = field(default_factory=list)

    def fill(self, num_sequences: int, first_block: int) -> int:
        """Prefill the prompts. Returns the first free block."""
        per_sequence = _MAX_LEN // self.leader.engine.card.layout.block_size
        for number in range(num_sequences):
            tokens = [1000 + 37 * number + place for place in range(_PROMPT_LEN)]
            sampling = SamplingParams(max_tokens=10_000, temperature=0.0, stop_token_ids=(_END,), guide=self.guide)
            blocks = list(range(first_block, first_block + per_sequence))
            first_block += per_sequence
            one = Sequence(f"r{number}", 1, tokens, _PROMPT_LEN, sampling, 0.0, block_tables=[blocks])
            if self.guide is not None:
                one.guide = compiled(self.compiler, sampling)
            self.leader.step([StepRow(one, _PROMPT_LEN)])
            one.num_computed_tokens = _PROMPT_LEN - 1
            self.sequences.append(one)
        return first_block

    def step(self) -> None:
        """One timed decode step. Finished sequences start again afterwards."""
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        results = self.leader.step([StepRow(one, 1) for one in self.sequences])
        for one, result in zip(self.sequences, results, strict=True):
            (token,) = result.tokens
            one.num_computed_tokens += 1
            one.append(token, _MAX_LEN - 1)
        self.step_s.append(time.perf_counter() - begun_s)
        self.step_cpu_s.append(time.process_time() - begun_cpu_s)
        for index, one in enumerate(self.sequences):
            assert one.failure is None, one.failure
            if one.is_over:
                guide = None if self.guide is None else compiled(self.compiler, one.sampling)
                prompt, num_computed = one.token_ids[:_PROMPT_LEN], _PROMPT_LEN - 1
                again = replace(
                    one, token_ids=prompt, num_computed_tokens=num_computed, finish_reason=None, guide=guide
                )
                one.set_status(SequenceStatus.FINISHED)  # frees its slot
                self.sequences[index] = again


def compiled(compiler: GrammarCompiler, sampling: SamplingParams) -> GuideState:
    """The guide's state, once it is compiled."""
    answers: queue.SimpleQueue[GuideResult] = queue.SimpleQueue()
    compiler.start(sampling, (), answers.put)
    result = answers.get(timeout=300)
    assert not isinstance(result, GuideRefusal), result.detail
    return result


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", default="demo", show_default=True, help="Model directory, Hugging Face id, or 'demo'.")
@click.option("--rows", default=16, show_default=True, type=click.IntRange(1, 64))
@click.option("--rounds", default=150, show_default=True, type=click.IntRange(10))
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1))
def main(model: str, rows: int, rounds: int, threads: int) -> None:
    """Measure and print."""
    directory = resolve_model(model)
    options = EngineOptions(
        directory, directory.name, device="cpu", kv_memory_bytes=2**29, num_threads=threads, max_num_seqs=2 * rows
    )
    engine = TorchEngine.load(options, lambda done, total: None)
    compiler, leader = GrammarCompiler(directory, engine.card.vocab_size), Leader(engine)
    guides = {**_GUIDES, "a call of one of two tools": _call_guide()}
    try:
        print("| guide | compiled in |\n| --- | --- |")
        warm = SamplingParams(max_tokens=1, guide=Guide(kind=GuideKind.REGEX, text="a"))
        print(f"| the first one, with the process that compiles | {_time_ms(compiler, warm):,.0f} ms |")
        for name, guide in guides.items():
            sampling = SamplingParams(max_tokens=1, guide=guide)
            print(f"| {name} | {_time_ms(compiler, sampling):.1f} ms, again: {_time_ms(compiler, sampling):.2f} ms |")
        print(
            f"\n| {rows} rows, {engine.card.layout.geometry.groups[0].dtype} | free step | guided step | ratio | of CPU time |"
        )
        print("| --- | --- | --- | --- | --- |")
        compared: dict[str, Guide | None] = {"nothing, against itself": None, **guides}
        for name, guided_by in compared.items():
            free, guided = Batch(leader, compiler, None), Batch(leader, compiler, guided_by)
            guided.fill(rows, free.fill(rows, 0))
            print(f"| {name} {_compare(free, guided, rounds)}", flush=True)
    finally:
        compiler.close()


def _call_guide() -> Guide:
    choice = parse_tool_choice("required", parse_tools(_TOOLS))
    guide = tool_guide(FAMILIES["hermes"], choice, None)
    assert guide is not None
    return guide


def _time_ms(compiler: GrammarCompiler, sampling: SamplingParams) -> float:
    begun_s = time.perf_counter()
    compiled(compiler, sampling)
    return 1e3 * (time.perf_counter() - begun_s)


def _compare(free: Batch, guided: Batch, rounds: int) -> str:
    for number in range(rounds + 10):
        for batch in (free, guided) if number % 2 else (guided, free):
            batch.step()
    free_ms, guided_ms = (1e3 * statistics.median(batch.step_s[10:]) for batch in (free, guided))
    of_time = _ratios(free.step_s[10:], guided.step_s[10:])
    of_cpu = _ratios(free.step_cpu_s[10:], guided.step_cpu_s[10:])
    return f"| {free_ms:.1f} ms | {guided_ms:.1f} ms | {of_time} | {of_cpu} |"


def _ratios(before_s: list[float], after_s: list[float]) -> str:
    ratios = [after / before for before, after in zip(before_s, after_s, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    return f"{median:.3f} (half of them {low:.3f} to {high:.3f})"


if __name__ == "__main__":
    sys.exit(main())
