"""Grammars as llguidance reads them, in lexemes, without changing what they match.

GBNF is read character by character; llguidance takes the longest match of a lexeme. So that both match the same, what is regular
becomes a lexeme only where its end shows in the next character: no lexeme that begins alike could go on there. In other grammars
every character is a lexeme of its own, which is slower to follow: milliseconds a mask, not microseconds. A grammar that is
ambiguous character by character is refused.

Which characters may follow which is found as in Glushkov, "The abstract theory of automata" (1961), by the places of characters
in a lexeme, and again by the places of lexemes in the grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product

from kvrelay.engine.guide_ebnf import (
    Characters,
    Choice,
    Lexeme,
    Node,
    Ranges,
    Reference,
    Repeat,
    Series,
    in_order,
    names_in,
    read_grammar,
)
from kvrelay.engine.guide_lark import Lark, Part, constant

_MAX_PLACES = 100_000  # of characters in lexemes, and pairs of them, that are looked at: about a second


def add_grammar(lark: Lark, text: str) -> Part:
    """The grammar ``text``, in GBNF, as a part of another. Raises UnsupportedGuideError."""
    rules = {name: _without_own_ends(name, body) for name, body in read_grammar(text).items()}
    regular = _regular_rules(rules)
    writer = _Writer(lark, rules)
    if "root" in regular:
        return writer.terminal("root")
    trees = {name: _in_lexemes(body, regular) for name, body in rules.items() if name not in regular}
    if _end_clearly(trees, rules):
        return writer.rules(trees)
    return writer.rules({name: _in_characters(body) for name, body in rules.items()})


def _without_own_ends(name: str, body: Node) -> Node:
    """A rule that begins or ends with itself as a loop, which is regular if its parts are, and cheaper."""
    choices = body.parts if isinstance(body, Choice) else (body,)
    for place, rest in ((-1, slice(None, -1)), (0, slice(1, None))):
        loops = [
            one for one in choices if isinstance(one, Series) and one.parts and one.parts[place] == Reference(name)
        ]
        others = [one for one in choices if one not in loops]
        bodies = [Series(one.parts[rest]) for one in loops]
        if loops and others and not any(name in names_in(one) for one in (*bodies, *others)):
            loop, end = Repeat(Choice(tuple(bodies)), 0, None), Choice(tuple(others))
            return Series((loop, end) if place else (end, loop))
    return body


def _regular_rules(rules: Mapping[str, Node]) -> set[str]:
    """Those from which no recursive rule can be reached."""
    regular: set[str] = set()
    while new := {name for name, body in rules.items() if name not in regular and set(names_in(body)) <= regular}:
        regular |= new
    return regular


def _in_lexemes(node: Node, regular: set[str]) -> Node:
    """The body of a rule, in which each part that is regular is a lexeme."""
    if set(names_in(node)) <= regular:
        return Lexeme(node)
    match node:
        case Series(parts) | Choice(parts):
            return type(node)(tuple(_in_lexemes(part, regular) for part in parts))
        case Repeat(part, least, most):
            return Repeat(_in_lexemes(part, regular), least, most)
    return node


def _in_characters(node: Node) -> Node:
    match node:
        case Characters():
            return Lexeme(node)
        case Series(parts) | Choice(parts):
            return type(node)(tuple(_in_characters(part) for part in parts))
        case Repeat(part, least, most):
            return Repeat(_in_characters(part), least, most)
    return node


class _Writer:
    """Writes rules down."""

    def __init__(self, lark: Lark, rules: Mapping[str, Node]) -> None:
        self._lark = lark
        self._rules = rules
        self._terminals: dict[str, Part] = {}

    def rules(self, trees: Mapping[str, Node]) -> Part:
        """What ``root`` matches."""
        names = {name: self._lark.new_name() for name in trees}
        for name, tree in trees.items():
            self._lark.rule(self._part(tree, names), names[name])
        return Part(names["root"], is_regular=False)

    def terminal(self, name: str) -> Part:
        """What a regular rule matches."""
        if name not in self._terminals:
            self._terminals[name] = self._lark.terminal(self._part(self._rules[name], {}))
        return self._terminals[name]

    def _part(self, tree: Node, names: Mapping[str, str]) -> Part:  # noqa: PLR0911 - one for each kind
        match tree:
            case Lexeme(body):
                return self._lark.lexeme(self._part(body, {}))
            case Characters(((first, last),)) if first == last:
                return constant(chr(first))
            case Characters(ranges):
                return Part("/[" + "".join(f"\\x{{{first:x}}}-\\x{{{last:x}}}" for first, last in ranges) + "]/")
            case Series(parts):
                return self._lark.sequence(self._part(part, names) for part in parts)
            case Choice(parts):
                return self._lark.either(self._part(part, names) for part in parts)
            case Repeat(part, least, most):
                return self._lark.repeat(self._part(part, names), least, most)
            case Reference(rule):
                return Part(names[rule], is_regular=False) if rule in names else self.terminal(rule)


@dataclass(frozen=True, slots=True)
class _Ends:
    """Of a part: whether it may be empty, and by their numbers the leaves that it may begin and end with."""

    may_be_empty: bool = False
    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()


class _Neighbours:
    """The leaves of some rules, and which may come next to each other: ``follow[n]`` behind the leaf ``n``."""

    def __init__(self, rules: Mapping[str, Node], leaf: type, may_be_empty: Callable[[Node], bool]) -> None:
        self._leaf, self._may_be_empty = leaf, may_be_empty
        self._numbers: dict[int, int] = {}
        self.leaves: list[Node] = []
        self.follow: list[set[int]] = []
        self._of_rules = dict.fromkeys(rules, _Ends())
        is_new = True
        while is_new:
            before = dict(self._of_rules), sum(map(len, self.follow))
            for name, tree in rules.items():
                self._of_rules[name] = self.ends(tree)
            is_new = before != (self._of_rules, sum(map(len, self.follow)))

    def ends(self, tree: Node) -> _Ends:
        """How a part begins and ends; takes note of what is next to each other in it."""
        if isinstance(tree, self._leaf):
            number = self._numbers.setdefault(id(tree), len(self.leaves))
            if number == len(self.leaves):
                self.leaves.append(tree)
                self.follow.append(set())
            return _Ends(self._may_be_empty(tree), frozenset({number}), frozenset({number}))
        match tree:
            case Series(parts):
                return self._series(map(self.ends, parts))
            case Choice(parts):
                found = [self.ends(part) for part in parts]
                firsts, lasts = (
                    frozenset[int]().union(*sets) for sets in ([e.first for e in found], [e.last for e in found])
                )
                return _Ends(any(one.may_be_empty for one in found), firsts, lasts)
            case Repeat(part, least, most):
                one = self.ends(part)
                if most != 1:
                    self._series((one, one))
                return _Ends(one.may_be_empty or least == 0, one.first, one.last)
            case Reference(rule):
                return self._of_rules[rule]
        raise AssertionError(f"{tree} is no part of such a tree")

    def _series(self, parts: Iterable[_Ends]) -> _Ends:
        whole = _Ends(may_be_empty=True)
        for part in parts:
            for number in whole.last:
                self.follow[number] |= part.first
            whole = _Ends(
                whole.may_be_empty and part.may_be_empty,
                whole.first | part.first if whole.may_be_empty else whole.first,
                whole.last | part.last if part.may_be_empty else part.last,
            )
        return whole


def _end_clearly(trees: Mapping[str, Node], rules: Mapping[str, Node]) -> bool:
    """Whether the next character shows where each lexeme ends."""
    inner = _Neighbours({}, Characters, lambda leaf: False)
    bodies: dict[int, _Ends] = {}  # of lexemes, by their ids
    budget = _MAX_PLACES

    def copied(node: Node) -> Node:
        """The same without references, and with places of its own."""
        nonlocal budget
        budget -= 1
        if budget < 0:
            raise OverflowError
        match node:
            case Characters(ranges):
                return Characters(ranges)
            case Series(parts) | Choice(parts):
                return type(node)(tuple(copied(part) for part in parts))
            case Repeat(part, least, most):
                return Repeat(copied(part), least, most)
            case Reference(rule):
                return copied(rules[rule])
        raise AssertionError(f"{node} is a lexeme within a lexeme")

    def body(leaf: Node) -> _Ends:
        assert isinstance(leaf, Lexeme)
        if id(leaf) not in bodies:
            bodies[id(leaf)] = inner.ends(copied(leaf.body))
        return bodies[id(leaf)]

    try:
        outer = _Neighbours(trees, Lexeme, lambda leaf: body(leaf).may_be_empty)
    except OverflowError:
        return False
    lexemes = [body(leaf) for leaf in outer.leaves]
    ranges = [leaf.ranges for leaf in inner.leaves if isinstance(leaf, Characters)]
    behind = [{place for other in follow for place in lexemes[other].first} for follow in outer.follow]
    next_ranges = [tuple(in_order([one for place in places for one in ranges[place]])) for places in behind]
    num_pairs = 0
    for number, other in product(range(len(lexemes)), repeat=2):
        seen: set[tuple[int, int]] = set()
        new = list(product(lexemes[number].first, lexemes[other].first))
        while new:
            pair = new.pop()
            if pair in seen:
                continue
            num_pairs += 1
            if num_pairs > _MAX_PLACES:
                return False
            seen.add(pair)
            mine, theirs = pair
            if not _overlap(ranges[mine], ranges[theirs]):
                continue
            if mine in lexemes[number].last and any(
                _overlap(ranges[place], next_ranges[number]) for place in inner.follow[theirs]
            ):
                return False  # where the one ends and another begins, the other could go on
            new += product(inner.follow[mine], inner.follow[theirs])
    return True


def _overlap(some: Ranges, others: Ranges) -> bool:
    return any(
        first <= other_last and other_first <= last for first, last in some for other_first, other_last in others
    )
