"""Which worker has which blocks in its prefix cache, as far as this gateway knows.

A worker does not report which blocks it keeps. But a gateway knows what it sent to each worker, and the hashes of those blocks
(:mod:`kvrelay.common.block_hash`). So it remembers for each hash which workers had the block last, in a bounded map whose least
recently used entry goes first. That is a guess: a worker may have evicted a block, and other gateways send requests, too. A
wrong guess costs what no guess would have cost: a decode worker that is to compute only the rest of a prompt first checks that
it has the other blocks (``Submit.max_uncached_tokens``).

Workers are known by address and epoch, so entries of an earlier process fit no worker. Pure state, no sockets, no clock. Not
thread-safe: lives on the gateway's asyncio loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from kvrelay.common.adapter_files import AdapterRef
from kvrelay.common.block_hash import HashChain
from kvrelay.gateway.workers.load import WorkerView

Holder = tuple[str, int]  # a worker's address and epoch

_MAX_HOLDERS = 32  # of one block, the latest; others may have it as well


class PrefixMap:
    """Who has which block, of at most ``max_blocks`` blocks. Some 150 bytes each."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._holders: OrderedDict[bytes, tuple[Holder, ...]] = OrderedDict()  # least recently recorded first

    def __len__(self) -> int:
        return len(self._holders)

    def record(self, hashes: Sequence[bytes], holder: Holder) -> None:
        """The worker has the blocks of this chain now."""
        blocks = self._holders
        before: tuple[Holder, ...] = ()
        after: tuple[Holder, ...] = (holder,)
        # From the tail: of a chain the map then forgets the tail before the head, without which it says nothing.
        for block_hash in reversed(hashes):
            known = blocks.get(block_hash, ())
            if known != before:  # mostly a whole chain has the same holders, in one and the same tuple
                others = tuple(one for one in known if one[0] != holder[0])  # the worker's other epochs are over
                before, after = known, (holder, *others)[:_MAX_HOLDERS]
            blocks[block_hash] = after
            blocks.move_to_end(block_hash)
        while len(blocks) > self._max_blocks:
            blocks.popitem(last=False)

    def find(self, hashes: Iterable[bytes]) -> dict[Holder, int]:
        """How many leading blocks of the chain each worker has. Of ``hashes`` no more is taken than somebody has, and one."""
        found: dict[Holder, int] = {}
        unbroken: tuple[Holder, ...] = ()
        num_blocks = 0
        for index, block_hash in enumerate(hashes):
            holders = self._holders.get(block_hash, ())
            if index == 0:
                unbroken = holders
            elif holders != unbroken:
                found.update((one, index) for one in unbroken if one not in holders)
                unbroken = tuple(one for one in unbroken if one in holders)
            if not unbroken:
                return found
            num_blocks = index + 1
        return found | dict.fromkeys(unbroken, num_blocks)

    def forget(self, hashes: Iterable[bytes], holder: Holder) -> None:
        """The worker does not have the blocks of this chain."""
        for block_hash in hashes:
            left = tuple(one for one in self._holders.get(block_hash, ()) if one != holder)
            if left:
                self._holders[block_hash] = left
            else:
                self._holders.pop(block_hash, None)


class RequestPrefix:
    """One request's tokens, seen as blocks: each is hashed once, however often the request is routed.

    To route it no more is hashed than is known, as its client waits; the rest when a worker has computed it.
    """

    def __init__(
        self,
        prefixes: PrefixMap | None,
        prompt_token_ids: Sequence[int],
        cache_salt: str = "",
        adapter: AdapterRef | None = None,
    ) -> None:
        """Without ``prefixes`` nothing is hashed, and nothing known."""
        self._prefixes = prefixes
        self._is_trusted = True  # what the map says
        self._prompt = prompt_token_ids
        self._cache_salt = cache_salt
        self._adapter = adapter
        self._fingerprint: bytes | None = None  # of the KV that the chain is for
        self._chain: HashChain | None = None
        self._holders: set[Holder] = set()  # that have the prompt, as this request has shown
        self.cached: Mapping[str, int] = {}  # what ``cached_tokens`` last said

    def cached_tokens(self, output: Sequence[int], views: Iterable[WorkerView]) -> Mapping[str, int]:
        """By address: so many leading tokens of prompt and ``output`` a worker need not compute. Who has none is not in it."""
        cached: dict[str, int] = {}
        self.cached = cached
        if self._prefixes is None or not self._is_trusted:
            return cached
        found: dict[Holder, int] | None = None
        for view in views:
            if found is None or view.fingerprint != self._fingerprint:
                # The last token is always computed anew: its logits are what is sampled from.
                num_reusable = (len(self._prompt) + len(output) - 1) // view.block_size
                hashes = self._chain_for(view).iterate(self._token_ids(output), num_reusable)
                found = self._prefixes.find(hashes)
            if num_blocks := found.get((view.address, view.epoch), 0):
                cached[view.address] = num_blocks * view.block_size
        return cached

    def on_cached(self, output: Sequence[int], view: WorkerView) -> None:
        """The worker has computed, or received and verified, all of prompt and ``output``."""
        holder = (view.address, view.epoch)
        if self._prefixes is not None and holder not in self._holders:
            self._holders.add(holder)
            self._prefixes.record(self._hash_all(output, view), holder)

    def on_end(self, output: Sequence[int], view: WorkerView) -> None:
        """An attempt is over; if the worker had what came before, it has prompt and ``output``."""
        holder = (view.address, view.epoch)
        if self._prefixes is not None and holder in self._holders:
            self._prefixes.record(self._hash_all(output, view), holder)

    def on_miss(self, view: WorkerView) -> None:
        """The worker did not have what it was thought to have: this request asks for nobody's any more."""
        self._is_trusted = False
        if self._prefixes is not None and self._chain is not None:
            self._prefixes.forget(self._chain.known, (view.address, view.epoch))

    def _hash_all(self, output: Sequence[int], view: WorkerView) -> list[bytes]:
        """Of all full blocks of prompt and ``output``."""
        num_full = (len(self._prompt) + len(output)) // view.block_size
        return self._chain_for(view).hashes(self._token_ids(output), num_full)

    def _chain_for(self, view: WorkerView) -> HashChain:
        if self._chain is None or view.fingerprint != self._fingerprint:
            self._fingerprint = view.fingerprint
            self._chain = HashChain(
                view.fingerprint, view.block_size, cache_salt=self._cache_salt, adapter=self._adapter
            )
        return self._chain

    def _token_ids(self, output: Sequence[int]) -> Sequence[int]:
        return [*self._prompt, *output] if output else self._prompt
