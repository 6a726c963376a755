"""The gain of speculation for texts that quote, and its cost without repetition: the same requests with and without, in turns.

    .venv/bin/python benchmarks/speculation.py                      # about 10 minutes
    .venv/bin/python benchmarks/speculation.py --drafter head       # the cost of a head that has memorised the answers

Two workers in one process have the same model, one with ``--speculation ngram``, or as ``--drafter`` says. A round sends the same
requests to each, in alternating order, while the other is idle. The result is the median of the rounds' ratios, of tokens per
second and per second of the process's CPU time. Other programs disturb the latter less. All tokens must be equal. ``--drafter off``
shows the noise of the machine, with two workers without speculation. Run it on an idle machine.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from speculation_parts.known_head import Text, save_known_head

from kvrelay.executor import LLM, Chat, SamplingParams, StructuredOutputsParams
from kvrelay.executor.request import Prompt
from kvrelay.launcher.models import resolve_model

_ARTICLE = (
    "The harbour of Port Alma was closed on Tuesday after a crane fell across the northern quay. Nobody was hurt, said the harbour "
    "master, Ingrid Solberg, but two ships could not leave. 'We will cut the crane into pieces and lift them out one by one,' she "
    "told reporters. The work is expected to take nine days and to cost four million crowns. The port handles a third of the "
    "country's grain, and bakers in the capital warned that flour may become scarce by the end of the month."
)
_CODE = """class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("balance is too small")
        self.balance = self.balance - amount
        return self.balance
"""
_PEOPLE = {
    "type": "array",
    "minItems": 6,
    "maxItems": 6,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
            "city": {"type": "string", "maxLength": 20},
            "is_member": {"type": "boolean"},
        },
        "required": ["name", "age", "city", "is_member"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True)
class Load:
    """Requests that run together."""

    name: str
    prompts: list[Prompt]
    params: list[SamplingParams]


def asked(text: str) -> Chat:
    """A chat with one question."""
    return Chat([{"role": "user", "content": text}])


def loads(num_streams: int, num_tokens: int) -> list[Load]:
    """Three texts that quote, with one stream each, and many that do not."""
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens)
    guided = SamplingParams(
        temperature=0, max_tokens=num_tokens, structured_outputs=StructuredOutputsParams(json=_PEOPLE)
    )
    summary = asked(f"Summarise this article in quotations from it, word by word.\n\n{_ARTICLE}")
    edit = asked(f"Rename balance to total in this code. Answer with all of the code.\n\n```python\n{_CODE}```")
    people = asked("List six people with name, age, city and is_member, as JSON.")
    topics = [asked(f"Tell me something new about the number {number}.") for number in range(num_streams)]
    random = [
        SamplingParams(temperature=1.0, seed=number, max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True)
        for number in range(num_streams)
    ]
    return [
        Load("summary with quotations", [summary], [greedy]),
        Load("code edit", [edit], [greedy]),
        Load("JSON by schema", [people], [guided]),
        Load(f"{num_streams} streams at random", list(topics), random),
    ]


@dataclass(frozen=True)
class Run:
    """The speed and the tokens of a load."""

    per_s: float  # tokens
    per_cpu_s: float
    tokens: list[list[int]]


def run(llm: LLM, load: Load) -> Run:
    """Run all requests of a load at once."""
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    outputs = llm.generate(load.prompts, load.params)
    took_s, took_cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    num_tokens = sum(map(len, tokens))
    return Run(num_tokens / took_s, num_tokens / took_cpu_s, tokens)


@contextlib.contextmanager
def head_of(model: str, plain: LLM, asked_for: Sequence[Load]) -> Iterator[str]:
    """The directory of a head that is trained on the answers to be drafted."""
    texts: list[Text] = []
    for load in asked_for:
        outputs = plain.generate(load.prompts, load.params)
        texts += [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]
    with tempfile.TemporaryDirectory() as directory:
        save_known_head(resolve_model(model), Path(directory) / "head", texts)
        yield str(Path(directory) / "head")


def spread(ratios: list[float]) -> str:
    """The median, and the range."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", default="demo", show_default=True, help="Model directory, Hugging Face id, or 'demo'.")
@click.option("--drafter", default="ngram", show_default=True, help="What --speculation says; off shows the noise.")
@click.option(
    "--draft-model",
    help="With --drafter draft-model: which one, named as the model is. With --drafter head: the head; default: one that is "
    "trained on the answers.",
)
@click.option("--only", default="", help="Requests whose name has this in it.")
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(1))
@click.option("--streams", default=32, show_default=True, type=click.IntRange(1, 64))
@click.option("--tokens", default=200, show_default=True, type=click.IntRange(2))
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1))
def main(
    model: str, drafter: str, draft_model: str | None, only: str, rounds: int, streams: int, tokens: int, threads: int
) -> None:
    """Measure and print."""
    options = {"threads": threads, "kv_memory_mb": 512}
    asked_for = [one for one in loads(streams, tokens) if only in one.name]
    with contextlib.ExitStack() as opened:
        plain = opened.enter_context(LLM(model, **options))
        if drafter == "head" and draft_model is None:
            draft_model = opened.enter_context(head_of(model, plain, asked_for))
        drafting = opened.enter_context(LLM(model, speculation=drafter, draft_model=draft_model, **options))
        print("| requests | tokens/s without | with | ratio, median (least to most) | the same by CPU time |")
        print("| --- | --- | --- | --- | --- |")
        for load in asked_for:
            for llm in (plain, drafting):  # fills the prefix caches
                run(llm, load)
            found: dict[LLM, list[Run]] = {plain: [], drafting: []}
            for number in range(rounds):
                for llm in (plain, drafting) if number % 2 else (drafting, plain):
                    found[llm].append(run(llm, load))
            pairs = list(zip(found[plain], found[drafting], strict=True))
            assert all(one.tokens == other.tokens for one, other in pairs), f"{load.name}: other tokens"
            without, with_drafts = (statistics.median(one.per_s for one in found[llm]) for llm in (plain, drafting))
            ratios = spread([other.per_s / one.per_s for one, other in pairs])
            cpu_ratios = spread([other.per_cpu_s / one.per_cpu_s for one, other in pairs])
            print(f"| {load.name} | {without:.0f} | {with_drafts:.0f} | {ratios} | {cpu_ratios} |", flush=True)


if __name__ == "__main__":
    main()
