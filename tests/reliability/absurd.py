"""Well-formed messages with absurd values: every field has the right type and any value of it.

They are made from the messages' own types, which msgspec describes, so that new messages and fields are fuzzed, too. ``known`` has
values by field that pass a worker's first checks: ids of running requests, right hashes and epochs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import msgspec
from msgspec import inspect

from kvrelay.wire.messages import Message

_INTS = (-(2**63), -(2**31), -5, -1, *range(6), 8, 63, 64, 255, 256, 1000, 2**31 - 1, 2**31, 2**32, 2**63, 2**64 - 1)
_FLOATS = (math.nan, math.inf, -math.inf, -1.0, -0.0, 0.0, 1e-300, 0.5, 1.0, 2.0, 30.0, 1e9, 1e308)
_STRINGS = ("", "a", "b", "0", "x" * 300, "line\nline", "\0", "ß𝄞", "tcp://127.0.0.1:1", "nonsense", "{}", "%s%n")
_SCALARS: dict[type[inspect.Type], Sequence[Any]] = {
    inspect.IntType: _INTS,
    inspect.FloatType: _FLOATS,
    inspect.StrType: _STRINGS,
    inspect.BoolType: (False, True),
    inspect.NoneType: (None,),
}
_LENGTHS = (0, 0, 1, 1, 2, 3, 6, 40)
_KNOWN_SHARE = 0.6

Known = Mapping[str, Sequence[Any]]
_Maker = Callable[[random.Random, Known], Any]


class AbsurdMessages:
    """Makes messages of all kinds, as plain values for msgpack."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._makers = {kind.__name__: _maker(inspect.type_info(kind)) for kind in get_args(Message)}

    def make(self, known: Known, kinds: Sequence[str] = ()) -> dict[str, Any]:
        """A message of one of ``kinds``, or of any kind."""
        made: dict[str, Any] = self._makers[self._rng.choice(kinds or list(self._makers))](self._rng, known)
        return made

    def frame(self, known: Known, kinds: Sequence[str] = ()) -> bytes:
        """Such a message as a control frame."""
        return msgspec.msgpack.encode(self.make(known, kinds))


def _maker(kind: inspect.Type) -> _Maker:
    made: _Maker
    match kind:
        case inspect.StructType():
            made = _struct(kind)
        case inspect.UnionType():
            parts = [_maker(part) for part in kind.types]
            made = lambda rng, known: rng.choice(parts)(rng, known)  # noqa: E731
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            each = _maker(item)
            made = lambda rng, known: [each(rng, known) for _ in range(rng.choice(_LENGTHS))]  # noqa: E731
        case inspect.TupleType(item_types=items):
            makers = [_maker(item) for item in items]
            made = lambda rng, known: [make(rng, known) for make in makers]  # noqa: E731
        case inspect.DictType(key_type=key_kind, value_type=value_kind):
            key, value = _maker(key_kind), _maker(value_kind)
            made = lambda rng, known: {key(rng, known): value(rng, known) for _ in range(rng.choice(_LENGTHS))}  # noqa: E731
        case inspect.EnumType(cls=cls):
            values = [each.value for each in cls]
            made = lambda rng, _: rng.choice(values)  # noqa: E731
        case inspect.BytesType():
            made = lambda rng, _: rng.randbytes(rng.choice((0, 1, 16, 16, 32, 33)))  # noqa: E731
        case inspect.IntType() | inspect.FloatType() | inspect.StrType() | inspect.BoolType() | inspect.NoneType():
            choices = _SCALARS[type(kind)]
            made = lambda rng, _: rng.choice(choices)  # noqa: E731
        case _:
            raise TypeError(f"{kind}: no values are made of this type yet; add them here")
    return made


def _struct(kind: inspect.StructType) -> _Maker:
    fields = [(field.encode_name, _maker(field.type), field.required) for field in kind.fields]

    def make(rng: random.Random, known: Known) -> Any:
        values: dict[str, Any] = {} if kind.tag_field is None or kind.array_like else {kind.tag_field: kind.tag}
        for name, maker, is_required in fields:
            if name in known and rng.random() < _KNOWN_SHARE:
                values[name] = rng.choice(known[name])
            elif is_required or kind.array_like or rng.random() < 0.5:
                values[name] = maker(rng, known)
        return list(values.values()) if kind.array_like else values

    return make
