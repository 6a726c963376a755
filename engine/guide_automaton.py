"""From the rules of a grammar to a deterministic automaton over the bytes of UTF-8, if the grammar is regular and it stays small.

Rules become a nondeterministic automaton, each part built in front of what follows it (Thompson, "Regular expression search
algorithm", CACM 1968). A rule that ends with itself is a loop; other recursion is given up on. Sets of its states become the
deterministic one's (Rabin and Scott, "Finite automata and their decision problems", 1959). Limits count work and not time, so that
the outcome is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrelay.engine.guide_rules import Characters, Choice, Node, Reference, Repeat, Rules, Series, Text

DEAD = 0
START = 1
_MAX_PARTS = 50_000  # states of the nondeterministic automaton
_MAX_STATES = 16_384
_MAX_WORK = 3_000_000  # states and steps looked at while sets are made: about a second
_MAX_DEPTH = 200  # of parts in parts
_END = 0  # of the nondeterministic automaton

# What UTF-8 writes in as many bytes; surrogates are no characters.
_CODE_RANGES = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF))

_ByteRanges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Automaton:
    """Begins in state START. From all states but DEAD an end can be reached; from that one none."""

    columns: npt.NDArray[np.uint8]  # [256]: the column of each byte
    moves: npt.NDArray[np.uint16]  # [num_states, num_columns]: the next state
    may_end: npt.NDArray[np.bool_]  # [num_states]: whether what was read matches


class NoAutomatonError(Exception):
    """The grammar is not regular, or matches nothing, or its automaton is too large."""


def build_automaton(rules: Rules) -> Automaton:
    """The automaton of all that the root rule matches. Raises NoAutomatonError."""
    parts = _Parts(rules)
    start = parts.add(Reference(rules.root), _END, 0)
    return _Sets(parts).automaton(start)


class _Parts:
    """The nondeterministic automaton while it grows. All of it leads to ``_END``."""

    def __init__(self, rules: Rules) -> None:
        self._bodies = rules.bodies
        self.steps: list[list[tuple[int, int, int]]] = [[]]  # by state: (first byte, last byte, next state)
        self.jumps: list[list[int]] = [[]]  # by state: where it may be as well
        self._entries: dict[tuple[int, int], int] = {}  # of a rule, in front of a state
        self._open: set[int] = set()  # rules that are being built
        self._before: dict[tuple[int, int, int], int] = {}  # states with just this step

    def add(self, node: Node, following: int, depth: int) -> int:
        """The state from which ``node`` leads to ``following``."""
        if depth > _MAX_DEPTH:
            raise NoAutomatonError(f"its parts stand more than {_MAX_DEPTH} deep in each other")
        match node:
            case Text(data):
                return self._add_bytes(tuple((byte, byte) for byte in data), following)
            case Characters(ranges):
                return self._add_characters(ranges, following)
            case Series(parts):
                for part in reversed(parts):
                    following = self.add(part, following, depth + 1)
                return following
            case Choice(parts):
                return self._state([self.add(part, following, depth + 1) for part in parts])
            case Repeat():
                return self._add_repeat(node, following, depth + 1)
            case Reference(rule):
                return self._add_rule(rule, following, depth + 1)

    def _add_rule(self, rule: int, following: int, depth: int) -> int:
        known = self._entries.get((rule, following))
        if known is not None:
            return known
        if rule in self._open:
            raise NoAutomatonError("a rule contains itself other than at its end")
        entry = self._entries[rule, following] = self._state([])
        self._open.add(rule)
        self.jumps[entry].append(self.add(self._bodies[rule], following, depth))
        self._open.remove(rule)
        return entry

    def _add_repeat(self, node: Repeat, following: int, depth: int) -> int:
        state = following
        if node.most is None:
            state = self._state([following])
            self.jumps[state].append(self.add(node.part, state, depth))
        else:
            for _ in range(node.least, node.most):
                state = self._state([self.add(node.part, state, depth), following])
        for _ in range(node.least):
            before, state = state, self.add(node.part, state, depth)
            if state == before:
                break  # it is nothing at all, however often
        return state

    def _add_characters(self, ranges: tuple[tuple[int, int], ...], following: int) -> int:
        state = self._state([])
        for first, last in ranges:
            for (low, high), *tail in _byte_ranges(first, last):
                self.steps[state].append((low, high, self._add_bytes(tuple(tail), following)))
        return state

    def _add_bytes(self, ranges: _ByteRanges, following: int) -> int:
        """A state from which bytes of these ranges lead to ``following``. Characters of a set share most of theirs."""
        for low, high in reversed(ranges):
            step = (low, high, following)
            if step not in self._before:
                self._before[step] = self._state([])
                self.steps[self._before[step]].append(step)
            following = self._before[step]
        return following

    def _state(self, jumps: list[int]) -> int:
        if len(self.steps) >= _MAX_PARTS:
            raise NoAutomatonError(f"its automaton has more than {_MAX_PARTS} parts")
        self.steps.append([])
        self.jumps.append(jumps)
        return len(self.steps) - 1

    def leading_to_end(self) -> list[bool]:
        """Whether each state leads to the end."""
        before: list[list[int]] = [[] for _ in self.steps]
        for state, (steps, jumps) in enumerate(zip(self.steps, self.jumps, strict=True)):
            for following in (*jumps, *(target for _, _, target in steps)):
                before[following].append(state)
        leads = [False] * len(self.steps)
        leads[_END] = True
        waiting = [_END]
        while waiting:
            for state in before[waiting.pop()]:
                if not leads[state]:
                    leads[state] = True
                    waiting.append(state)
        return leads


class _Sets:
    """Makes the deterministic automaton: its states are sets of the other one's."""

    def __init__(self, parts: _Parts) -> None:
        self._jumps = parts.jumps
        self._leads = parts.leading_to_end()
        cuts = {0} | {cut for steps in parts.steps for low, high, _ in steps for cut in (low, high + 1)}
        self._columns = np.searchsorted(sorted(cuts - {256}), np.arange(256), side="right") - 1
        self._num_columns = int(self._columns[-1]) + 1
        column_of = self._columns.tolist()
        self._steps = [
            [(column_of[low], column_of[high] + 1, target) for low, high, target in steps if self._leads[target]]
            for steps in parts.steps
        ]
        self._work = 0
        self._sets: list[frozenset[int]] = [frozenset()]
        self._numbers: dict[frozenset[int], int] = {}  # of sets, and of what they are reached from

    def automaton(self, start: int) -> Automaton:
        if not self._leads[start]:
            raise NoAutomatonError("nothing matches it")
        self._number(frozenset((start,)))
        moves = [[DEAD] * self._num_columns]
        while len(moves) < len(self._sets):
            moves.append(self._moves(self._sets[len(moves)]))
        may_end = np.array([_END in states for states in self._sets])
        return Automaton(self._columns.astype(np.uint8), np.array(moves, dtype=np.uint16), may_end)

    def _moves(self, states: frozenset[int]) -> list[int]:
        targets: list[set[int]] = [set() for _ in range(self._num_columns)]
        for state in states:
            for first, last, target in self._steps[state]:
                self._count(last - first)
                for column in range(first, last):
                    targets[column].add(target)
        return [self._number(frozenset(reached)) if reached else DEAD for reached in targets]

    def _number(self, reached: frozenset[int]) -> int:
        number = self._numbers.get(reached)
        if number is None:
            states = self._with_jumps(reached)
            number = self._numbers.setdefault(states, len(self._sets))
            self._numbers[reached] = number
            if number == len(self._sets):
                self._sets.append(states)
                if number >= _MAX_STATES:
                    raise NoAutomatonError(f"its automaton has more than {_MAX_STATES} states")
        return number

    def _with_jumps(self, reached: frozenset[int]) -> frozenset[int]:
        """``reached`` and where that leads without a byte, less what only leads on to others."""
        seen = set(reached)
        waiting = list(reached)
        while waiting:
            for state in self._jumps[waiting.pop()]:
                if self._leads[state] and state not in seen:
                    seen.add(state)
                    waiting.append(state)
        self._count(len(seen))
        return frozenset(state for state in seen if state == _END or self._steps[state])

    def _count(self, work: int) -> None:
        self._work += work
        if self._work > _MAX_WORK:
            raise NoAutomatonError("its automaton takes too long to make")


def _byte_ranges(first: int, last: int) -> Iterator[_ByteRanges]:
    """The characters from ``first`` to ``last`` as UTF-8 writes them: ranges for each byte."""
    for low, high in _CODE_RANGES:
        start, end = max(first, low), min(last, high)
        if start <= end:
            yield from _split(chr(start).encode(), chr(end).encode())


def _split(low: bytes, high: bytes) -> Iterator[_ByteRanges]:
    num_behind = len(low) - 1
    if low[0] == high[0] or not num_behind:
        tails = _split(low[1:], high[1:]) if num_behind else iter([()])
        yield from (((low[0], high[0]), *tail) for tail in tails)
        return
    least, most = b"\x80" * num_behind, b"\xbf" * num_behind
    first, last = low[0], high[0]
    if low[1:] != least:
        yield from (((first, first), *tail) for tail in _split(low[1:], most))
        first += 1
    if high[1:] != most:
        yield from (((last, last), *tail) for tail in _split(least, high[1:]))
        last -= 1
    if first <= last:
        yield ((first, last), *((0x80, 0xBF),) * num_behind)
