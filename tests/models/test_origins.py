"""What a tensor without numbers remembers of the operations that it goes through."""

from __future__ import annotations

import torch
from torch import nn

from kvrelay.engine.models.hf.origins import Origin, Rows, Traced

HALF = torch.float16


def matrix(name: str, num_outs: int = 6, num_ins: int = 4) -> Traced:
    return Traced.of(name, (num_outs, num_ins), HALF)


def rows(name: str, start: int = 0, stop: int = 6, ins: range = range(4)) -> Rows:
    return Rows(name, range(start, stop), ins)


def test_a_moved_matrix_is_itself() -> None:
    moved = matrix("a")[...].to(device="cpu", dtype=torch.float32).contiguous()
    parameter = nn.Parameter(moved, requires_grad=False)
    assert isinstance(parameter, Traced)
    assert (parameter.is_meta, parameter.dtype) == (True, torch.float32)
    assert parameter.origin == Origin(((rows("a"),),), is_stack=False)


def test_experts_are_stacked_and_joined() -> None:
    gates, ups = (torch.stack([matrix(f"{name}{one}") for one in (0, 1)], dim=0) for name in ("gate", "up"))
    joined = torch.cat([gates, ups], dim=1)
    assert isinstance(joined, Traced)
    both = ((rows("gate0"), rows("up0")), (rows("gate1"), rows("up1")))
    assert joined.origin == Origin(both, is_stack=True)
    assert joined.sources == {"gate0", "gate1", "up0", "up1"}
    turned = torch.transpose(joined, dim0=1, dim1=2)
    assert isinstance(turned, Traced)
    assert turned.origin == Origin(both, is_stack=True, is_transposed=True)
    as_they_are = Traced.of("experts", (2, 4, 6), HALF, has_inputs_first=True)
    assert as_they_are.origin == Origin(((rows("experts"),), (rows("experts", 6, 12),)), True, is_transposed=True)
    (gate, up) = torch.chunk(as_they_are, 2, dim=-1)
    assert isinstance(up, Traced)
    assert up.origin == Origin(((rows("experts", 3, 6),), (rows("experts", 9, 12),)), True, is_transposed=True)
    assert gate.shape == (2, 4, 3)


def test_a_matrix_is_divided() -> None:
    whole = torch.cat([matrix("a"), matrix("b")], dim=0)
    first, second, third = (one.contiguous() for one in torch.split(whole, [2, 6, 4], dim=0))
    found = [one.origin for one in (first, second, third) if isinstance(one, Traced)]
    pieces = [(rows("a", 0, 2),), (rows("a", 2, 6), rows("b", 0, 2)), (rows("b", 2, 6),)]
    assert found == [Origin((piece,), is_stack=False) for piece in pieces]


def test_a_rank_has_a_part_of_a_matrix() -> None:
    joined = torch.cat([matrix("gate"), matrix("up")], dim=0)
    assert isinstance(joined, Traced)
    assert joined.origin is not None
    pieces = (rows("gate", 2, 5), rows("up", 2, 5))  # of each half
    assert joined.origin.part(0, (range(2, 5), range(8, 11))) == Origin((pieces,), is_stack=False)
    assert joined.origin.part(0, (range(4, 8),)) == Origin(((rows("gate", 4), rows("up", 0, 2)),), is_stack=False)
    columns = (rows("gate", ins=range(1, 3)), rows("up", ins=range(1, 3)))
    assert joined.origin.part(1, (range(1, 3),)) == Origin((columns,), is_stack=False)
    assert joined.origin.part(1, (range(1), range(2, 3))) is None
    experts = Traced.of("experts", (2, 4, 6), HALF, has_inputs_first=True).origin  # inputs before outputs
    assert experts is not None
    found = experts.part(2, (range(2), range(3, 5)))
    assert found is not None
    first, second = ((rows("experts", start, start + 2), rows("experts", start + 3, start + 5)) for start in (0, 6))
    assert found.matrices == (first, second)
    fewer = experts.part(1, (range(2, 4),))
    assert fewer is not None
    assert [one.ins for one in fewer.rows] == [range(2, 4)] * 2


def test_what_is_no_order_of_rows_has_no_origin() -> None:
    """But its sources are known: they must be read in full."""
    a, b, written = matrix("a"), matrix("b"), matrix("a")
    written[:2] = b[4:]
    changed = [
        written,
        a.reshape(3, 8),
        a.float() * 2,
        torch.cat([a, b], dim=1),
        torch.cat([a, torch.empty(6, 4, device="meta")]),
        torch.stack([a, b], dim=1),
        torch.chunk(a, 2, dim=1)[0],
        torch.stack([torch.stack([a]), torch.stack([b])]),
    ]
    assert all(isinstance(one, Traced) and one.origin is None and "a" in one.sources for one in changed)
