"""The comparison, with a fake deployment over real HTTP and a fake reference."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvrelay.common.errors import SettingsError
from kvrelay.launcher import cli
from kvrelay.launcher.client import http_client, served_model
from kvrelay.launcher.errors import AnswerError
from kvrelay.launcher.local.deployment import LogRecorder
from kvrelay.launcher.settings import LocalSettings
from kvrelay.launcher.verify import run as verify
from kvrelay.launcher.verify.prompts import built_in_prompts, prompts_from_file, tokenizer_of
from kvrelay.launcher.verify.reference import Reference
from kvrelay.launcher.verify.run import Difference, first_difference

NUM_POSITIONS = 4096


def right_answer(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The fake model's output."""
    return [(sum(prompt) + index) % 1000 for index in range(max_tokens)]


class FakeDeployment(http.server.ThreadingHTTPServer):
    """Answers like a gateway. ``wrong_length``: prompts of this length get a wrong token at position 2."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.wrong_length: int | None = None
        self.without_ids = False
        self.served = ["tiny"]
        self.num_handoffs = 0
        self.requests: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: FakeDeployment

    def do_GET(self) -> None:
        if self.path == "/metrics":
            lines = [
                "# TYPE kvrelay_handoffs_total counter",
                f'kvrelay_handoffs_total{{outcome="verified"}} {self.server.num_handoffs}.0',
                'kvrelay_handoffs_total{outcome="integrity"} 7.0',
            ]
            self.answer_text("\n".join(lines) + "\n")
        else:
            self.answer_text(json.dumps({"data": [{"id": name} for name in self.server.served]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        token_ids = right_answer(body["prompt"], body["max_tokens"])
        if len(body["prompt"]) == self.server.wrong_length:
            token_ids[2] += 1
        choice = {"text": ""} if self.server.without_ids else {"token_ids": token_ids}
        self.answer_text(json.dumps({"choices": [choice]}))

    def answer_text(self, text: str) -> None:
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def deployment() -> Iterator[FakeDeployment]:
    with FakeDeployment() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model directory with a tokenizer of one token per character, and a fake transformers."""
    from tokenizers import Tokenizer  # noqa: PLC0415
    from tokenizers.models import BPE  # noqa: PLC0415

    directory = tmp_path / "tiny"
    directory.mkdir()
    vocabulary = {chr(32 + index): index for index in range(95)}
    Tokenizer(BPE(vocab=vocabulary, merges=[])).save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": NUM_POSITIONS}))
    (directory / "model.safetensors").write_text("")

    class FakeReference(Reference):
        def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[tuple[int, ...]]:
            return [tuple(right_answer(prompt, max_tokens)) for prompt in prompts]

        def score(self, questions: Sequence[object]) -> list[float]:
            return [0.25] * len(questions)

    monkeypatch.setattr(verify, "Reference", FakeReference)
    monkeypatch.setenv("COLUMNS", "200")
    return directory


def test_equal_answers_end_with_0(model: Path, deployment: FakeDeployment, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["verify", "--model", str(model), "--url", deployment.url]) == 0
    output = capsys.readouterr().out
    assert "all 40 answers equal transformers, 64 tokens each" in output
    assert "16 at a time" in output
    assert len(deployment.requests) == 40, "20 prompts alone and 20 together"
    assert all(
        request["model"] == "tiny" and request["temperature"] == 0 and request["ignore_eos"] is True
        for request in deployment.requests
    )


@pytest.mark.parametrize(
    ("served", "asked"), [(["other", "tiny"], "tiny"), (["other", "tiny-adapter"], "other"), (["other"], "other")]
)
def test_the_model_that_is_compared_is_asked(
    served: list[str], asked: str, model: Path, deployment: FakeDeployment
) -> None:
    deployment.served = served
    assert cli.run(["verify", "--model", str(model), "--url", deployment.url]) == 0
    assert {request["model"] for request in deployment.requests} == {asked}


def test_one_other_token_ends_with_1_and_is_shown(
    model: Path, deployment: FakeDeployment, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment.wrong_length = 513
    assert cli.run(["verify", "--model", str(model), "--url", deployment.url, "--max-tokens", "4"]) == 1
    output = capsys.readouterr().out
    assert "2 of 40 answers differ from transformers" in output
    assert "at 2: " in output
    assert "logit gap 0.25" in output


@pytest.mark.parametrize(("arguments", "device"), [([], "cpu"), (["--device", "cuda"], "cuda")])
def test_transformers_leaves_the_gpu_to_the_deployment_at_the_url(
    arguments: list[str], device: str, model: Path, deployment: FakeDeployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[str] = []

    def generate(self: Reference, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[tuple[int, ...]]:
        devices.append(self.device)
        return [tuple(right_answer(prompt, max_tokens)) for prompt in prompts]

    monkeypatch.setattr("kvrelay.launcher.verify.run.Reference.generate", generate)
    command = ["verify", "--model", str(model), "--max-tokens", "3"]
    assert cli.run([*command, "--url", deployment.url, *arguments]) == 0
    fake_local_deployment(deployment, monkeypatch)
    deployment.num_handoffs = 20
    assert cli.run([*command, *arguments]) == 0
    assert devices == [device, *(arguments[1:] or ["auto"])]


def test_a_server_that_sends_no_token_ids(
    model: Path, deployment: FakeDeployment, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment.without_ids = True
    assert cli.run(["verify", "--model", str(model), "--url", deployment.url]) == 1
    assert "sends no choices[].token_ids" in capsys.readouterr().err


def test_a_server_that_is_not_there() -> None:
    with http_client("http://127.0.0.1:9", 1.0) as client, pytest.raises(AnswerError, match="does not answer"):
        served_model(client)


@pytest.mark.parametrize(("url", "code"), [("http://[::1", 2), ("http://127.0.0.1:9", 1)])
def test_transformers_does_not_run_for_a_server_that_is_not_there(
    url: str, code: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reference, "generate", lambda *_: pytest.fail("that takes minutes"))
    assert cli.run(["verify", "--model", str(model), "--url", url]) == code


def fake_local_deployment(server: FakeDeployment, monkeypatch: pytest.MonkeyPatch) -> list[LocalSettings]:
    """``server`` stands for every deployment that verify starts. Returns the list of their settings."""
    started: list[LocalSettings] = []

    class Deployment(contextlib.nullcontext["Deployment"]):
        url = server.url
        admin_urls = {"decode-0": server.url}  # noqa: RUF012
        log = LogRecorder()

        def __enter__(self) -> Deployment:
            return self

        @classmethod
        def from_settings(cls, settings: LocalSettings, _: Path) -> Deployment:
            started.append(settings)
            return cls()

        def wait_ready(self, _: float) -> None:
            self.log.on_line("decode-0", "a line of the log")

    monkeypatch.setattr(verify, "LocalDeployment", Deployment)
    return started


def test_without_a_url_each_path_and_pass_has_a_deployment_of_its_own(
    model: Path, deployment: FakeDeployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = fake_local_deployment(deployment, monkeypatch)
    deployment.num_handoffs = 20
    arguments = ["--max-tokens", "3", "--dtype", "bfloat16", "--backend", "transformers"]
    assert cli.run(["verify", "--model", str(model), *arguments]) == 0
    assert "all 80 answers equal transformers" in capsys.readouterr().out
    assert [settings.deployment.prefill for settings in started] == [0, 0, 1, 1]
    assert {
        tuple(settings.components[name] for name in ("dtype", "backend", "local_prefill")) for settings in started
    } == {("bfloat16", "transformers", "fallback")}


def test_prompts_that_were_not_handed_over_prove_nothing(
    model: Path, deployment: FakeDeployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_local_deployment(deployment, monkeypatch)
    deployment.num_handoffs = 19
    assert cli.run(["verify", "--model", str(model), "--max-tokens", "3"]) == 1
    message = capsys.readouterr().err
    assert "only 19 of 20 prompts were handed over" in message
    assert "decode-0 | a line of the log" in message


def test_prompts_from_a_file(model: Path, deployment: FakeDeployment, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Hello"}\n\n{"prompt": "World", "note": "more keys do not matter"}\n')
    command = ["verify", "--model", str(model), "--url", deployment.url, "--prompts", str(file), "--max-tokens", "3"]
    assert cli.run(command) == 0
    assert [len(request["prompt"]) for request in deployment.requests] == [5] * 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prompts"),
        ('{"prompt": "a"}\nnot json', 'line 2 of .* is not an object with a "prompt"'),
        ('{"text": "a"}', "line 1 of"),
        ('{"prompt": 3}', "must be text, not 3"),
        ('{"prompt": "aaaaaaaaaaa"}', "line 1 of .* has 11 tokens; it must have 1 to 10"),
    ],
)
def test_bad_prompt_files_name_the_line(text: str, message: str, tmp_path: Path, model: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(SettingsError, match=message):
        prompts_from_file(file, tokenizer_of(model), max_tokens=10)


def test_more_output_than_the_model_takes(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["verify", "--model", str(model), "--max-tokens", "5000"]) == 2
    assert "--max-tokens is 5000; tiny takes 4096 tokens in all" in capsys.readouterr().err


def test_the_built_in_prompts(model: Path) -> None:
    encode = tokenizer_of(model)
    prompts = built_in_prompts(encode, 8000)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    assert len(prompts) == 20
    assert (min(lengths), max(lengths)) == (1, 2000)
    assert sum(length > 512 for length in lengths) >= 2, "longer than the chunk budget"
    first, second = prompts[-2].token_ids, prompts[-1].token_ids
    assert first[:600] == second[:600]
    assert first[600:] != second[600 : len(first)]
    assert prompts == built_in_prompts(encode, 8000), "the same at every run"
    assert max(len(prompt.token_ids) for prompt in built_in_prompts(encode, 50)) == 50


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == Difference(1, 2, 5)
    assert first_difference([1, 2], [1]) == Difference(1, 2, None)
    assert first_difference([1], [1, 2]) == Difference(1, None, 2)
