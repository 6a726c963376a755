"""Recurrent kernels against references in float64, over states in a pool that is full of NaN elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvrelay.kernels.recurrent.convolution import causal_convolution, causal_convolution_reference
from kvrelay.kernels.recurrent.delta_rule import gated_delta_rule, gated_delta_rule_reference
from kvrelay.kernels.recurrent.ragged import DeltaInputs, RaggedStates, SpaceInputs
from kvrelay.kernels.recurrent.state_space import state_space, state_space_reference
from tests.kernels.conftest import DTYPES

Randn = Callable[..., torch.Tensor]
AssertClose = Callable[[torch.Tensor, torch.Tensor], None]
NUM_BLOCKS = 16
# Parts of each sequence. The first of a sequence that continues may end in the block that it reads; a part may be shorter than
# what a convolution looks back.
STEPS = {
    "single tokens": [[1], [1], [1]],
    "prompts": [[1, 2, 8, 1], [5], [8, 8, 3], [1]],
    "one": [[19]],
}


def states_of(parts: list[list[int]], device: str) -> RaggedStates:
    """Every second sequence continues, in the block that it reads. New ones are told to read a block of NaN."""
    seqs = [seq for seq, its in enumerate(parts) for _ in range(sum(its))]
    starts = torch.tensor([0, *(one for its in parts for one in its)]).cumsum(0).int()
    firsts = torch.tensor([0, *map(len, parts)]).cumsum(0).int()
    write = torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(2))[: int(firsts[-1])]
    is_new = torch.arange(len(parts)) % 2 == 1
    read = write[firsts[:-1].long()].masked_fill(is_new, NUM_BLOCKS - 1)
    on = {"device": device}
    return RaggedStates(
        torch.tensor(seqs).int().to(**on), starts.to(**on), firsts.to(**on), read.to(**on), is_new.to(**on), write.to(**on)
    )  # fmt: skip


def pool_of(states: RaggedStates, shape: tuple[int, ...], dtype: torch.dtype, randn: Randn) -> torch.Tensor:
    """States of the sequences that continue, in blocks with 16 bytes in front."""
    padded = torch.full((NUM_BLOCKS, 16 + math.prod(shape)), math.nan, dtype=dtype, device=states.read.device)
    pool = padded[:, 16:].unflatten(1, shape)
    old = states.read[~states.is_new]
    pool[old] = randn(len(old), *shape, dtype=dtype)
    return pool


def assert_equal_but_for_rounding(found: torch.Tensor, expected: torch.Tensor, assert_close: AssertClose) -> None:
    """Blocks that no part writes keep their NaN."""
    assert found.isnan().equal(expected.isnan())
    assert not found.isnan().all()
    assert_close(found.nan_to_num(), expected.nan_to_num().double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [4, 3])
@pytest.mark.parametrize("step", STEPS)
def test_convolution(
    step: str, width: int, dtype: torch.dtype, device: str, randn: Randn, assert_close: AssertClose, poisoned_empty: None
) -> None:  # fmt: skip
    states, num_channels = states_of(STEPS[step], device), 140
    inputs = randn(states.num_tokens, num_channels + 3, dtype=dtype)[:, 3:]
    weight = randn(num_channels, width, dtype=dtype)
    bias = randn(num_channels, dtype=dtype) if width == 4 else None
    pool = pool_of(states, (num_channels, width), dtype, randn)
    expected_pool = pool.clone()
    expected = causal_convolution_reference(inputs, weight, bias, expected_pool, states)
    assert_close(causal_convolution(inputs, weight, bias, pool, states), expected.double())
    assert pool.nan_to_num().equal(expected_pool.nan_to_num())
    assert pool.isnan().equal(expected_pool.isnan())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_keys", "key_size", "value_size"), [(2, 16, 40), (4, 24, 16)])
@pytest.mark.parametrize("step", STEPS)
def test_delta_rule(
    step: str, num_keys: int, key_size: int, value_size: int, dtype: torch.dtype, device: str, randn: Randn,
    assert_close: AssertClose, poisoned_empty: None,
) -> None:  # fmt: skip
    states, num_heads = states_of(STEPS[step], device), 4
    mixed = randn(states.num_tokens, 2 * num_keys * key_size + num_heads * value_size + 8, dtype=dtype)[:, 8:]
    gates = randn(states.num_tokens, 2 * num_heads, dtype=dtype)
    gates[0, :2] = 60.0  # softplus of this is itself
    biases = randn(2, num_heads, dtype=dtype)
    inputs = DeltaInputs(mixed, gates[:, :num_heads], gates[:, num_heads:], biases[0].float(), biases[1])
    pool = pool_of(states, (num_heads, key_size, value_size), torch.float32, randn)
    expected_pool = pool.clone()
    expected = gated_delta_rule_reference(inputs, expected_pool, states)
    assert_close(gated_delta_rule(inputs, pool, states), expected.double())
    assert_equal_but_for_rounding(pool, expected_pool, assert_close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_keys", "head_size", "state_size"), [(2, 40, 16), (1, 16, 24)])
@pytest.mark.parametrize("step", STEPS)
def test_state_space(
    step: str, num_keys: int, head_size: int, state_size: int, dtype: torch.dtype, device: str, randn: Randn,
    assert_close: AssertClose, poisoned_empty: None,
) -> None:  # fmt: skip
    states, num_heads = states_of(STEPS[step], device), 4
    mixed = randn(states.num_tokens, num_heads * head_size + 2 * num_keys * state_size + 8, dtype=dtype)[:, 8:]
    steps = randn(states.num_tokens, num_heads + 3, dtype=dtype)[:, 3:]
    rates, bias, skip = randn(3, num_heads, dtype=dtype)
    inputs = SpaceInputs(mixed, steps, rates.float(), bias, skip, (0.4, 0.9))
    pool = pool_of(states, (num_heads, head_size, state_size), torch.float32, randn)
    expected_pool = pool.clone()
    expected = state_space_reference(inputs, expected_pool, states)
    assert_close(state_space(inputs, pool, states), expected.double())
    assert_equal_but_for_rounding(pool, expected_pool, assert_close)
    with pytest.raises(ValueError, match="numbers per token, expected 4 values of"):
        state_space(replace(inputs, mixed=mixed[:, 1:]), pool, states)


def test_a_token_of_a_very_short_step_adds_as_much_as_it_should(device: str) -> None:
    """``log(1 + x)`` of such a step in fp32 is off by a fifth."""
    states = states_of([[1], [1]], device)
    heads = torch.zeros(2, 1, device=device)
    mixed = torch.ones(2, 16 + 2 * 16, device=device)
    inputs = SpaceInputs(mixed, heads - 15, heads[0], heads[0], heads[0], (0.0, math.inf))
    found = state_space(inputs, torch.zeros(NUM_BLOCKS, 1, 16, 16, device=device), states)
    torch.testing.assert_close(found, torch.full_like(found, 16 * math.log1p(math.exp(-15))), rtol=1e-5, atol=0)


def test_the_rule_computes_what_its_authors_wrote(device: str, randn: Randn, assert_close: AssertClose) -> None:
    """Of one head of two numbers, by hand: what a key answered is replaced by half."""
    states = states_of([[2]], device)
    zero, key, other = [0.0, 0.0], [3.0, 4.0], [-4.0, 3.0]  # of length 5, and at right angles
    mixed = torch.tensor([[*key, *key, 1.0, 2.0], [*other, *key, *zero]], device=device)
    nothing = torch.zeros(2, 1, device=device)  # beta is then 1/2
    inputs = DeltaInputs(mixed, nothing - 100, nothing, nothing[0], nothing[0])  # nothing fades
    pool = torch.zeros(NUM_BLOCKS, 1, 2, 2, device=device)
    found = gated_delta_rule(inputs, pool, states)
    root = 2**0.5
    assert_close(found[:, 0], torch.tensor([[0.5 / root, 1.0 / root], zero], dtype=torch.float64, device=device))
    answers = torch.tensor([0.6, 0.8], device=device) @ pool[states.write[0], 0]
    assert_close(answers, torch.tensor([0.25, 0.5], dtype=torch.float64, device=device))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mixed": torch.zeros(19, 70)}, "mixed has 70 numbers per token, expected 4 values of 8, and as many queries"),
        ({"mixed": torch.zeros(18, 80)}, r"mixed has shape \(18, 80\)"),
        ({"decay": torch.zeros(19, 2)}, r"decay has shape \(19, 2\), expected \[19, 4\]"),
        ({"log_rates": torch.zeros(3)}, "log_rates has shape"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], reason: str) -> None:
    states, heads = states_of(STEPS["one"], "cpu"), torch.zeros(19, 4)
    inputs = DeltaInputs(torch.zeros(19, 2 * 2 * 12 + 4 * 8), heads, heads, heads[0], heads[0])
    pool = torch.zeros(NUM_BLOCKS, 4, 12, 8)
    with pytest.raises(ValueError, match=reason):
        gated_delta_rule(replace(inputs, **changes), pool, states)
    with pytest.raises(ValueError, match="pool has dtype"):
        gated_delta_rule(inputs, pool.half(), states)
