"""Logits processors are found by name in installed packages, and run for the rows that name them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvrelay.common.errors import SettingsError
from kvrelay.engine.factory import load_engine
from kvrelay.engine.sampling.processors import load_processors
from kvrelay.engine.settings import FakeSettings, KvSettings, ModelSettings
from tests.engine.conftest import load, sequence
from tests.engine.sampling.rig import processed, run

MODULE = """
def double(logits, token_ids):
    logits.mul_(2.0)


def only_unseen(logits, token_ids):
    for row, seen in zip(logits, token_ids):
        row[list(seen)] = float("-inf")


constant = 7
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with processors, as pip leaves it."""
    (tmp_path / "operators_processors.py").write_text(MODULE)
    for name, entries in {
        "operators": "double = operators_processors:double\nonly-unseen = operators_processors:only_unseen\n"
        "constant = operators_processors:constant\nmissing = operators_processors:nothing\ntwice = operators_processors:double\n",
        "others": "twice = operators_processors:only_unseen\n",
    }.items():
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[kvrelay.logits_processors]\n{entries}")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_a_processor_of_an_installed_package_runs_for_the_rows_that_ask() -> None:
    processors = load_processors(("only-unseen", "double"))
    assert list(processors) == ["only-unseen", "double"]
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(1))
    rows = [
        sequence([3, 4], []),
        sequence([5, 6, 7], [], processors=("double",)),
        sequence([8], [], processors=("double", "only-unseen")),
        sequence([9, 0], [], processors=("only-unseen", "double"), temperature=1.0),
    ]
    rows[1].num_prompt_tokens = 1
    given = processed(logits, rows, processors)
    expected = logits * torch.tensor([1.0, 2.0, 2.0, 2.0])[:, None]
    expected[2, 8] = expected[3, 9] = expected[3, 0] = -torch.inf
    assert torch.equal(given, expected)
    assert run(logits, rows, processors)[3].token_id not in (9, 0)


def test_processors_run_in_the_order_of_the_request_and_once_for_all_rows() -> None:
    calls: list[tuple[str, list[list[int]]]] = []

    def add(logits: torch.Tensor, token_ids: list[list[int]]) -> None:
        calls.append(("add", [list(ids) for ids in token_ids]))
        logits += 1.0

    def double(logits: torch.Tensor, token_ids: list[list[int]]) -> None:
        calls.append(("double", [list(ids) for ids in token_ids]))
        logits *= 2.0

    rows = [
        sequence([1], [], processors=("add", "double")),
        sequence([2], [], processors=("double", "add")),
        sequence([3], [], processors=("add",)),
    ]
    given = processed(torch.full((3, 2), 3.0), rows, {"add": add, "double": double})
    assert given[:, 0].tolist() == [8.0, 7.0, 4.0]
    assert calls == [("add", [[1], [3]]), ("double", [[2]]), ("double", [[1]]), ("add", [[2]])]


def test_what_is_forbidden_stays_so_whatever_a_processor_makes_of_it() -> None:
    row = sequence([1], [], processors=("zero",), allowed_token_ids=(3,), logit_bias=((3, 2.0),))
    given = processed(torch.zeros(1, 6), [row], {"zero": lambda logits, token_ids: logits.zero_()})
    assert given.tolist() == [[-torch.inf] * 3 + [0.0] + [-torch.inf] * 2]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("doubel", "names 'doubel', which no installed package registers .* registered are: constant, double"),
        ("missing", r"'missing' \(operators_processors:nothing\) cannot be loaded: AttributeError"),
        ("constant", r"'constant' \(operators_processors:constant\) is 7, not a callable"),
        ("twice", "names 'twice', which is registered as .*double and .*only_unseen; uninstall one"),
    ],
)
def test_what_cannot_be_loaded_ends_the_start(name: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_processors((name,))


@pytest.mark.usefixtures("installed")
def test_a_worker_is_started_with_names_and_its_card_says_them(llama: tuple[Path, object]) -> None:
    def start(engine: str, *names: str) -> tuple[str, ...]:
        return load_engine(
            ModelSettings(model=str(llama[0]), device="cpu", threads=1, logits_processors=names),
            KvSettings(num_blocks=16),
            FakeSettings(engine=engine),
            max_num_seqs=1,
            max_batched_tokens=64,
            decodes=True,
            progress=lambda done, total: None,
        ).card.processors

    for engine in ("model", "fake"):
        assert start(engine, "double", "only-unseen") == ("double", "only-unseen")
        assert start(engine) == ()
        with pytest.raises(SettingsError, match="--logits-processors names 'nobody'"):
            start(engine, "nobody")
    assert load(llama[0], processors=load_processors(("double",))).card.layout == load(llama[0]).card.layout
