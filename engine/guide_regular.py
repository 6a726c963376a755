"""Guides that are regular: an automaton over bytes, and the mask of each of its states, made once when the guide is compiled.

A grammar that counts within counts, or is ambiguous, makes xgrammar try thousands of tokens one by one for each mask. An automaton
knows them beforehand. Many of its states have equal masks (in ``[a-z]{1,500}`` all but the last few), so few are made and kept.
What a sequence costs per token is a look into two tables.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from kvrelay.engine.bitmask import num_words
from kvrelay.engine.guide_automaton import DEAD, START, Automaton

_MAX_LOOKUPS = 400_000_000  # to make the masks of one guide: some seconds
_MAX_MASK_BYTES = 2**25


class _Tables(msgspec.Struct, frozen=True):
    """A regular guide as it leaves the process that compiles; arrays in the byte order of this machine."""

    columns: bytes
    moves: bytes
    may_end: bytes
    mask_of: bytes
    masks: bytes


@dataclass(frozen=True, slots=True)
class RegularGuide:
    """A compiled guide. States are the automaton's."""

    automaton: Automaton
    mask_of: npt.NDArray[np.int32]  # [num_states]: its row in masks
    masks: npt.NDArray[np.int32]  # [num_masks, ceil(vocab_size / 32)]: bit t % 32 of word t // 32 if token t may come

    @property
    def memory_size_bytes(self) -> int:
        """What it takes, masks for the most part."""
        return self.automaton.moves.nbytes + self.automaton.may_end.nbytes + self.mask_of.nbytes + self.masks.nbytes

    def to_bytes(self) -> bytes:
        """For :meth:`from_bytes` in another process."""
        of = self.automaton
        arrays = (of.columns, of.moves, of.may_end, self.mask_of, self.masks)
        return msgspec.msgpack.encode(_Tables(*(array.tobytes() for array in arrays)))

    @classmethod
    def from_bytes(cls, data: bytes, vocab_size: int) -> RegularGuide:
        """What :meth:`to_bytes` gave, for a model of ``vocab_size`` tokens."""
        tables = msgspec.msgpack.decode(data, type=_Tables)
        may_end = np.frombuffer(tables.may_end, dtype=np.bool_)
        moves = np.frombuffer(tables.moves, dtype=np.uint16).reshape(len(may_end), -1)
        return cls(
            Automaton(np.frombuffer(tables.columns, dtype=np.uint8), moves, may_end),
            np.frombuffer(tables.mask_of, dtype=np.int32),
            np.frombuffer(tables.masks, dtype=np.int32).reshape(-1, num_words(vocab_size)),
        )


@dataclass(frozen=True, slots=True)
class TokenTree:
    """A vocabulary's tokens by their leading bytes: what has the same ones shares a node. Node 0 is no byte at all."""

    levels: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]]  # by depth: each node's parent, and its byte
    node_of: npt.NDArray[np.int64]  # [vocab_size]: where each token ends; 0: it cannot come
    num_nodes: int

    @classmethod
    def of(cls, vocabulary: Seq[bytes]) -> TokenTree:
        """Of each token's bytes. A token without any never comes."""
        lengths = np.array([len(token) for token in vocabulary])
        text = np.frombuffer(b"".join(vocabulary), dtype=np.uint8)
        starts = np.cumsum(lengths) - lengths
        levels = []
        node_of = np.zeros(len(vocabulary), dtype=np.int64)
        num_nodes = 1
        for depth in range(int(lengths.max(initial=0))):
            longer = np.flatnonzero(lengths > depth)
            nodes, place = np.unique(node_of[longer] * 256 + text[starts[longer] + depth], return_inverse=True)
            node_of[longer] = num_nodes + place
            levels.append((nodes // 256, (nodes % 256).astype(np.uint8)))
            num_nodes += len(nodes)
        return cls(levels, node_of, num_nodes)

    def within(self, automaton: Automaton) -> TokenTree:
        """Without what comes in no state, as far as pairs of neighbouring bytes show it: most of it, in most automata."""
        is_alive = automaton.moves != DEAD
        num_columns = is_alive.shape[1]
        # Whether a byte may follow another; in the last row, whether it may come at all.
        may_follow = np.array(
            [is_alive[following].any(axis=0) for following in automaton.moves.T] + [is_alive.any(axis=0)]
        )
        column_of = np.full(self.num_nodes, num_columns)
        is_kept = np.zeros(self.num_nodes, dtype=np.bool_)
        is_kept[0] = True
        first = 1
        for parents, text in self.levels:
            nodes = slice(first, first + len(parents))
            column_of[nodes] = automaton.columns[text]
            is_kept[nodes] = is_kept[parents] & may_follow[column_of[parents], column_of[nodes]]
            first = nodes.stop
        number_of = np.where(is_kept, np.cumsum(is_kept) - 1, 0)
        levels, first = [], 1
        for parents, text in self.levels:
            kept = is_kept[first : first + len(parents)]
            if kept.any():
                levels.append((number_of[parents[kept]], text[kept]))
            first += len(parents)
        return TokenTree(levels, number_of[self.node_of], int(is_kept.sum()))

    def mask(self, automaton: Automaton, state: int) -> npt.NDArray[np.int32]:
        """The tokens that may come in ``state``, ``[ceil(vocab_size / 32)]``."""
        moves, num_columns = automaton.moves.reshape(-1), automaton.moves.shape[1]
        states = np.full(self.num_nodes, DEAD, dtype=np.int64)
        states[0] = state
        first = 1
        for parents, text in self.levels:
            states[first : first + len(parents)] = moves[states[parents] * num_columns + automaton.columns[text]]
            first += len(parents)
        states[0] = DEAD
        bits = np.packbits(states[self.node_of] != DEAD, bitorder="little")
        words = np.zeros(num_words(len(self.node_of)), dtype="<i4")
        words.view(np.uint8)[: len(bits)] = bits
        return words.astype(np.int32, copy=False)


def make_regular_guide(automaton: Automaton, tree: TokenTree) -> RegularGuide | None:
    """The guide with its masks, for a vocabulary's ``tree``; None if they take too long or too much memory."""
    tree = tree.within(automaton)
    kind_of = _alike(automaton, len(tree.levels))
    kinds, examples = np.unique(kind_of, return_index=True)
    if len(kinds) * tree.num_nodes > _MAX_LOOKUPS:
        return None
    rows: dict[bytes, int] = {}
    row_of_kind = [rows.setdefault(tree.mask(automaton, state).tobytes(), len(rows)) for state in examples.tolist()]
    masks = np.frombuffer(b"".join(rows), dtype=np.int32).reshape(len(rows), -1)
    if masks.nbytes > _MAX_MASK_BYTES:
        return None
    return RegularGuide(automaton, np.array(row_of_kind, dtype=np.int32)[kind_of], masks)


def _alike(automaton: Automaton, max_len: int) -> npt.NDArray[np.int64]:
    """A number for each state; equal ones if no text of ``max_len`` bytes or fewer is a dead end for just one of the states.

    Moore's algorithm ("Gedanken-experiments on sequential machines", 1956), stopped after as many rounds.
    """
    kinds: npt.NDArray[np.int64] = (np.arange(len(automaton.moves)) != DEAD).astype(np.int64)
    for _ in range(max_len):
        refined = kinds
        for column in range(automaton.moves.shape[1]):
            pairs = refined * len(kinds) + kinds[automaton.moves[:, column]]
            refined = np.unique(pairs, return_inverse=True)[1]
        if refined.max() == kinds.max():
            break
        kinds = refined
    return kinds


class RegularState:
    """Where one sequence stands. Implements :class:`kvrelay.engine.sequence.GuideState`."""

    def __init__(self, guide: RegularGuide, vocabulary: Seq[bytes], stop_token_ids: Seq[int]) -> None:
        """``vocabulary``: each token's bytes. ``stop_token_ids``: see XGrammarState."""
        self._guide = guide
        self._vocabulary = vocabulary
        self._stop_token_ids = frozenset(stop_token_ids)
        self._stop_bits = np.zeros(num_words(len(vocabulary)), dtype=np.int32)
        for token_id in stop_token_ids:
            if 0 <= token_id < len(vocabulary):
                self._stop_bits.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
        self._text_bits = ~self._stop_bits
        self._state = START

    def fill(self, bitmask: npt.NDArray[np.int32]) -> None:
        """See GuideState. Clears the bits of all other tokens."""
        np.bitwise_and(self._mask, self._text_bits, out=bitmask)
        if self._may_end:
            bitmask |= self._stop_bits

    def accept(self, token_id: int) -> None:
        """See GuideState. The ValueError says why, in words for the client."""
        if self.trouble is not None:
            raise ValueError(self.trouble)
        automaton, state = self._guide.automaton, self._state
        text = b"" if token_id in self._stop_token_ids else self._vocabulary[token_id]
        for byte in text:
            state = int(automaton.moves[state, automaton.columns[byte]])
        if not text or state == DEAD:
            raise ValueError(f"token {token_id} came where the guide does not allow it")
        self._state = state

    @property
    def trouble(self) -> str | None:
        """Why no token can be accepted any more: the model may have none for what has to come."""
        if self._may_end or self._has_text:
            return None
        return "the guide allows no token at all here: nothing can match it"

    @property
    def is_complete(self) -> bool:
        """See GuideState."""
        return self._may_end and not self._has_text

    @property
    def _mask(self) -> npt.NDArray[np.int32]:
        mask: npt.NDArray[np.int32] = self._guide.masks[self._guide.mask_of[self._state]]
        return mask

    @property
    def _may_end(self) -> bool:
        return bool(self._guide.automaton.may_end[self._state])

    @property
    def _has_text(self) -> bool:
        return bool((self._mask & self._text_bits).any())
