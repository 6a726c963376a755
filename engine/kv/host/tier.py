"""The tier of KV blocks in the host's memory, below a GPU's pool. One thread copies in both directions, beside steps.

**Out.** Each block that is published is copied as soon as the thread gets to it (:mod:`kvrelay.engine.kv.host.copies_out`), and
stays in the pool (write-through). A copy at eviction would let the step that takes the block wait.

**Back.** ``fetch`` takes blocks of the pool for what a prompt begins with, as an owner of its own. The thread copies them in. Those
whose digests are right are published, as if they had been computed, and all are released. The prompt then finds them in the prefix
cache. It waits for its own fetch only. If it goes meanwhile, the blocks come all the same. A block whose digests are wrong is
dropped, and its tokens are computed.

A block's digests (:mod:`kvrelay.common.block_digests`) are made of the pool's memory in both directions, by a device that can hash.
Memory that is registered with the device is copied directly, other memory through :mod:`kvrelay.engine.kv.device.staging`.

The least recently used block leaves for a new one. A block that the pool evicts becomes the most recently used one. So what the
pool has just lost stays longest, the head of a prefix longer than its tail.

Locks: the block manager's first, then this one's, then the store's. This one is held for moments, and never while bytes are copied.
A copy that fails ends the tier. Steps find out by themselves whether the device still works.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvrelay.common.kv_geometry import KvGeometry
from kvrelay.engine.kv.block_manager import BlockManager, Missing
from kvrelay.engine.kv.host.blocks import HostBlock, HostBlocks
from kvrelay.engine.kv.host.copies_out import COPIES_AT_ONCE, CopiesOut
from kvrelay.engine.kv.lower_tier import Fetch
from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.engine.step.interface import BlockStore

logger = logging.getLogger(__name__)

_MIN_SHARE = 0.125  # of a prompt's tokens that are not cached. For less, a prompt does not wait for a fetch

Arrived = list[tuple[Missing, frozenset[str]]]
"""Blocks that are copied in and proved, each with the other workers whose work is in it."""


@dataclass(slots=True, eq=False)
class _Return:
    """A fetch, and what is to be copied in for it."""

    owner: Owner
    hashes: Sequence[bytes]
    num_cached: int  # leading blocks that the pool had
    missing: list[Missing]
    fetch: Fetch = field(default_factory=Fetch)

    @property
    def missing_hashes(self) -> Iterator[bytes]:
        """Of the blocks to copy in."""
        return (one.block_hash for one in self.missing)


@dataclass(slots=True, eq=False)
class _CopyIn:
    """A block on its way to the pool."""

    one: Missing
    block: HostBlock  # lent
    wait: Callable[[], bytes]  # returns the digests of what is in the pool


class HostTier:
    """Implements :class:`kvrelay.engine.kv.lower_tier.LowerTier`. ``start`` once, ``close`` once."""

    def __init__(
        self,
        store: BlockStore,
        blocks: BlockManager,
        geometry: KvGeometry,
        memory: memoryview,
        *,
        tell: Callable[[str, int], None],
        on_returned: Callable[[], None],
    ) -> None:
        """``memory``: flat bytes that begin with a page, for at least one physical block. It is the tier's until ``close``.

        ``tell``: called with an event and a number, on any thread: blocks that were ``kept``, ``missed`` (they left the pool too
        soon, or found no memory), ``returned``, ``wrong`` (their digests), and ``tokens`` that returned. ``on_returned``: called
        after each fetch, on the tier's thread or, if the tier is over, on the caller's.
        """
        self._store = store
        self._blocks = blocks
        self._tell = tell
        self._on_returned = on_returned
        group_nbytes = [geometry.block_size * group.token_nbytes for group in geometry.groups]
        self._kept = HostBlocks(memory, store.block_nbytes, group_nbytes)
        register = store.register
        self._unregister = None if register is None else register(memory)
        self._changed = threading.Condition()
        self._out = CopiesOut(store, self._kept, self._changed, tell)
        self._returns: deque[_Return] = deque()
        self._unfinished: dict[_Return, None] = {}  # also the one that is carried out
        self._num_fetches = 0
        self._is_over = False  # nothing more is kept or fetched
        self._is_wrong = False  # a block has come back with other bytes
        self._thread = threading.Thread(target=self._run, name="host-kv", daemon=True)

    @property
    def num_slots(self) -> int:
        """The most blocks that it keeps, each a physical one of some group."""
        return self._kept.num_slots

    @property
    def num_kept(self) -> int:
        """The number of blocks that it has."""
        return len(self._kept)

    @property
    def num_queued(self) -> int:
        """The number of blocks that wait to be copied out."""
        return len(self._out)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread after the copies under way, and release the blocks of fetches that have not begun."""
        self._end()
        if self._thread.ident is not None:
            self._thread.join()
        self._give_up_returns()
        if self._unregister is not None:
            self._unregister()
            self._unregister = None

    def check_integrity(self) -> None:
        """Assert that every slot is in one state. While nothing is copied."""
        self._out.check_integrity()

    # -- the block manager's news, and the scheduler's wish --------------------------------------------------------

    def on_published(self, block_id: int, group: int, block_hash: bytes, sources: frozenset[str]) -> None:
        """See Watcher."""
        with self._changed:
            self._kept.touch(group, block_hash, is_in_pool=True)
            if not self._is_over:
                self._out.on_published(block_id, group, block_hash, sources)
                self._changed.notify()

    def on_unpublished(self, block_id: int, group: int, block_hash: bytes) -> None:
        """See Watcher."""
        with self._changed:
            self._kept.touch(group, block_hash, is_in_pool=False)
            self._out.on_unpublished(block_id)

    def on_distrusted(self, source: str) -> None:
        """See Watcher."""
        with self._changed:
            self._kept.drop_from(source)

    def fetch(self, hashes: Sequence[bytes]) -> Fetch | None:
        """See LowerTier."""
        num_cached = self._blocks.num_cached_prefix(hashes)
        # Read without the lock: a block that leaves meanwhile does not come, and is computed.
        num_blocks = self._blocks.num_cached_prefix(hashes, self._kept.by_group)
        if num_blocks - num_cached < max(1, _MIN_SHARE * (len(hashes) - num_cached)):
            return Fetch(is_done=True)
        if (fetch := self._shared(hashes[num_cached:num_blocks])) is not None:
            return fetch
        owner = Owner(OwnerKind.RETURN, str(self._num_fetches))
        missing = self._blocks.begin_return(owner, hashes[:num_blocks])
        if missing is None:
            return None
        self._num_fetches += 1
        job = _Return(owner, hashes, num_cached, missing)
        with self._changed:
            self._returns.append(job)
            self._unfinished[job] = None
            self._changed.notify()
            is_over = self._is_over
        if is_over:
            self._give_up_returns()
        return job.fetch

    def _shared(self, hashes: Sequence[bytes]) -> Fetch | None:
        """The fetch of another prompt that brings some of these blocks; None if there is none."""
        with self._changed:
            if not self._unfinished:
                return None
            wanted = set(hashes)
            return next((one.fetch for one in self._unfinished if not wanted.isdisjoint(one.missing_hashes)), None)

    # -- the thread ------------------------------------------------------------------------------------------------

    def work(self) -> bool:
        """Carry out the next fetch, or else a few copies out. False if there is nothing to do. On the tier's thread.

        Raises RuntimeError if the device, or a rank, has failed.
        """
        with self._changed:
            job = self._returns.popleft() if self._returns else None
        if job is None:
            return self._out.work()
        self._copy_in(job)
        return True

    def _run(self) -> None:
        try:
            while not self._is_over:
                if not self.work():
                    with self._changed:
                        self._changed.wait_for(lambda: self._is_over or self._returns or len(self._out))
        except Exception:
            logger.exception(
                "a KV block could not be copied to or from the host's memory; none are kept there any more"
            )
            self._end()
            self._give_up_returns()

    def _end(self) -> None:
        with self._changed:
            self._is_over = True
            self._out.clear()
            self._kept.clear()  # a fetch would take blocks of the pool for what does not come any more
            self._changed.notify()

    def _give_up_returns(self) -> None:
        while True:
            with self._changed:
                if not self._returns:
                    return
                job = self._returns.popleft()
            self._finish(job, [])

    # -- back ------------------------------------------------------------------------------------------------------

    def _copy_in(self, job: _Return) -> None:
        under_way: deque[_CopyIn] = deque()
        arrived: Arrived = []
        try:
            for one in job.missing:
                if len(under_way) == COPIES_AT_ONCE:
                    self._land(under_way.popleft(), arrived)
                if (copy := self._begin(one)) is not None:
                    under_way.append(copy)
            while under_way:
                self._land(under_way.popleft(), arrived)
        finally:
            for copy in under_way:  # after an error: each uses its slot until it is over
                with contextlib.suppress(Exception):  # whatever it is, the prompt must not wait for ever
                    copy.wait()
                self._give_back(copy.block)
            self._finish(job, arrived)

    def _begin(self, one: Missing) -> _CopyIn | None:
        """Begin to copy a block in; None if it is not here any more."""
        with self._changed:
            block = self._kept.lend(one.group, one.block_hash)
        if block is None:
            return None
        try:
            return _CopyIn(one, block, self._store.begin_write(one.block_id, one.group, block.memory))
        except BaseException:
            self._give_back(block)
            raise

    def _land(self, copy: _CopyIn, arrived: Arrived) -> None:
        """Wait for a block, and compare its digests."""
        try:
            is_right = copy.wait() == copy.block.digests
        finally:
            self._give_back(copy.block)
        if is_right:
            arrived.append((copy.one, copy.block.sources))
            return
        if not self._is_wrong:
            self._is_wrong = True  # the metric counts the others
            logger.error("a KV block came back from the host's memory with other bytes; its tokens are computed")
        self._tell("wrong", 1)
        with self._changed:
            self._kept.drop(copy.block)

    def _give_back(self, block: HostBlock) -> None:
        with self._changed:
            self._kept.give_back(block)

    def _finish(self, job: _Return, arrived: Arrived) -> None:
        self._blocks.end_return(job.owner, arrived)
        num_blocks = max(0, self._blocks.num_cached_prefix(job.hashes) - job.num_cached)
        self._tell("returned", len(arrived))
        self._tell("tokens", num_blocks * self._blocks.block_size)
        with self._changed:
            del self._unfinished[job]
        job.fetch.is_done = True
        self._on_returned()
