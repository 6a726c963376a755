"""Settings of ``kvrelay bench``, in groups: one for each part of the benchmark.

``workload.py`` and ``values.py`` parse texts such as ``--burst "every=5s,n=4"``.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.common.settings import setting


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """What is measured."""

    url: str | None = setting(
        None, "server to measure, any with an OpenAI-compatible API; default: http://127.0.0.1:8000"
    )
    model: str | None = setting(
        None, "model to ask for; default: the first that the server lists (with --self-serve the one to serve: demo)"
    )
    api: str = setting(
        "completions",
        "route to ask, and what prompts are: completions with token ids (exact lengths), completions with text, or chats",
        choices=("completions", "text", "chat"),
    )
    api_key: str | None = setting(
        None,
        "sent as a bearer token; not kept in the result; better as KVRELAY_API_KEY: others on this machine see flags",
    )
    self_serve: bool = setting(False, "start a deployment on a free port of this machine, measure it and stop it")
    serve: str | None = setting(
        None, 'how to serve: options of `kvrelay local` as "prefill=1,decode=1,dtype=bfloat16"; means --self-serve'
    )
    server_pid: tuple[int, ...] = setting(
        (),
        "processes of the server at --url, if it runs on this machine: their CPU, with that of all they started, is the server's",
        minimum=1,
    )
    start_timeout_s: float = setting(600.0, "how long the start of a deployment may take", unit="s", minimum=1)


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """How many requests come, and when. Either rate or concurrency."""

    rate: float | None = setting(
        None, "requests per second, sent when they are due whatever the server does (open loop)", minimum=0.001
    )
    arrival: str = setting(
        "poisson", "gaps between requests at --rate: random or all the same", choices=("poisson", "constant")
    )
    concurrency: int | None = setting(
        None,
        "requests at a time, each sent when one ends (closed loop); 8 if nothing else is given",
        minimum=1,
        maximum=10_000,
    )
    burst: str | None = setting(
        None, 'requests on top that come together, as "every=5s,n=4,input=1500,output=16"; counted apart'
    )
    duration_s: float | None = setting(
        None, "how long requests are sent (answers are waited for); default: 30", unit="s", minimum=0.1
    )
    requests: int | None = setting(None, "how many requests are sent, instead of a duration", minimum=1)
    warmup: str | None = setting(
        None, "how long requests come first that are not counted, as 5s; 0: not at all; default: 2s"
    )
    timeout_s: float = setting(300.0, "after which an answer counts as failed", unit="s", minimum=0.1)


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """What is asked."""

    input_len: str = setting(
        "128", 'tokens of a prompt: "128", "uniform:64-256", "normal:512,128", "lognormal:512,128"'
    )
    output_len: str = setting("64", "tokens to generate, written like --input-len")
    prefix_tokens: int = setting(0, "tokens before each prompt that it shares with its group", unit="tokens", minimum=0)
    prefix_groups: int = setting(1, "groups of requests that share a prefix", minimum=1)
    token_ids: str = setting("1000-20000", "range of the random token ids; must be ids of plain text")
    seed: int = setting(0, "same seed: same times, lengths and groups")
    prompt_seed: int | None = setting(
        None,
        "seed of the prompts' tokens; default: a new one each run, so that no prompt is in a prefix cache",
        minimum=0,
    )
    ignore_eos: bool = setting(True, "generate --output-len tokens, whatever the model says; an OpenAI extension")
    temperature: float = setting(0.0, "of sampling; 0 is greedy", minimum=0, maximum=2)


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """What is made of it."""

    name: str | None = setting(None, "what the run is called in tables; default: the model's name")
    slo: str | None = setting(None, 'what a good answer is, as "ttft=1s,itl=100ms,e2e=10s"')
    output: str | None = setting(None, "where the result goes as JSON: every request with all its times")


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """``kvrelay bench``: a load, measured from the client's side."""

    target: TargetSettings
    load: LoadSettings
    prompt: PromptSettings
    report: ReportSettings

    @property
    def is_self_served(self) -> bool:
        """Whether bench starts what it measures."""
        return self.target.self_serve or self.target.serve is not None
