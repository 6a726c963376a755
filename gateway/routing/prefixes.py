"""Which worker has which blocks in its prefix cache, as far as this gateway knows.

A worker does not report which blocks it keeps. But a gateway knows what it sent to each worker, and the hashes of those blocks
(:mod:`kvrelay.common.block_hash`). So for each hash it remembers the workers that had the block last, in a bounded map that drops
the least recently used entry first. This is a guess: a worker may have evicted a block, and other gateways send requests, too. A
wrong guess costs no more than no guess: a decode worker that is to compute only the rest of a prompt first checks that it has the
other blocks (``Submit.max_uncached_tokens``).

Workers are identified by address and epoch, so entries of an earlier process match no worker. Pure state without sockets or a
clock. Not thread-safe: lives on the gateway's asyncio loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from kvrelay.common.adapter_files import AdapterRef
from kvrelay.common.block_hash import HashChain
from kvrelay.common.images import ImageSpan
from kvrelay.gateway.workers.load import WorkerView

Holder = tuple[str, int]  # a worker's address and epoch

_MAX_HOLDERS = 32  # the latest holders of one block; other workers may have it as well


class PrefixMap:
    """Which workers have a block, for at most ``max_blocks`` blocks. An entry takes about 150 bytes."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._holders: OrderedDict[bytes, tuple[Holder, ...]] = OrderedDict()  # least recently recorded first

    def __len__(self) -> int:
        return len(self._holders)

    def record(self, hashes: Sequence[bytes], holder: Holder) -> None:
        """Record that the worker now has the blocks of this chain."""
        blocks = self._holders
        before: tuple[Holder, ...] = ()
        after: tuple[Holder, ...] = (holder,)
        # The tail is recorded first, so the map forgets a chain's tail before its head. Without the head the tail is
        # useless.
        for block_hash in reversed(hashes):
            known = blocks.get(block_hash, ())
            if known != before:  # a whole chain usually has the same holders, in one shared tuple
                # Entries of the worker's earlier epochs are obsolete.
                others = tuple(one for one in known if one[0] != holder[0])
                before, after = known, (holder, *others)[:_MAX_HOLDERS]
            blocks[block_hash] = after
            blocks.move_to_end(block_hash)
        while len(blocks) > self._max_blocks:
            blocks.popitem(last=False)

    def find(self, hashes: Iterable[bytes]) -> dict[Holder, int]:
        """The number of leading blocks of the chain that each worker has.

        Consumes ``hashes`` only up to the first unknown block.
        """
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
        """Record that the worker does not have the blocks of this chain."""
        for block_hash in hashes:
            left = tuple(one for one in self._holders.get(block_hash, ()) if one != holder)
            if left:
                self._holders[block_hash] = left
            else:
                self._holders.pop(block_hash, None)


class RequestPrefix:
    """One request's tokens as blocks. Each block is hashed once, however often the request is routed.

    While the client waits for routing, only as many blocks are hashed as the map knows. The rest is hashed when a worker has
    computed it.
    """

    def __init__(
        self,
        prefixes: PrefixMap | None,
        prompt_token_ids: Sequence[int],
        cache_salt: str = "",
        adapter: AdapterRef | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> None:
        """Without ``prefixes`` nothing is hashed and nothing is known. ``images``: of the prompt, in order."""
        self._prefixes = prefixes
        self._is_trusted = True  # use what the map says
        self._prompt = prompt_token_ids
        self._cache_salt = cache_salt
        self._adapter = adapter
        self._images = images
        self._fingerprint: bytes | None = None  # the KV layout that the chain is for
        self._chain: HashChain | None = None
        self._holders: set[Holder] = set()  # workers that have the prompt, as this request has seen itself
        self.cached: Mapping[str, int] = {}  # the last result of ``cached_tokens``

    def cached_tokens(self, output: Sequence[int], views: Iterable[WorkerView]) -> Mapping[str, int]:
        """By address: leading tokens of prompt and ``output`` that a worker need not compute. Workers with none are left out."""
        cached: dict[str, int] = {}
        self.cached = cached
        if self._prefixes is None or not self._is_trusted:
            return cached
        found: dict[Holder, int] | None = None
        for view in views:
            if found is None or view.fingerprint != self._fingerprint:
                # The last token is always computed, because its logits are needed for sampling.
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
        """An attempt is over. If the worker had the prompt, it also has ``output``."""
        holder = (view.address, view.epoch)
        if self._prefixes is not None and holder in self._holders:
            self._prefixes.record(self._hash_all(output, view), holder)

    def on_miss(self, view: WorkerView) -> None:
        """The worker did not have the blocks that the map said. From now on this request does not use the map."""
        self._is_trusted = False
        if self._prefixes is not None and self._chain is not None:
            self._prefixes.forget(self._chain.known, (view.address, view.epoch))

    def _hash_all(self, output: Sequence[int], view: WorkerView) -> list[bytes]:
        """The hashes of all full blocks of prompt and ``output``."""
        num_full = (len(self._prompt) + len(output)) // view.block_size
        return self._chain_for(view).hashes(self._token_ids(output), num_full)

    def _chain_for(self, view: WorkerView) -> HashChain:
        if self._chain is None or view.fingerprint != self._fingerprint:
            self._fingerprint = view.fingerprint
            self._chain = HashChain(
                view.fingerprint,
                view.block_size,
                cache_salt=self._cache_salt,
                adapter=self._adapter,
                images=self._images,
            )
        return self._chain

    def _token_ids(self, output: Sequence[int]) -> Sequence[int]:
        return [*self._prompt, *output] if output else self._prompt
