"""The decode worker's service. The test plays the model thread and the prefill workers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from prometheus_client import CollectorRegistry

from kvrelay.common.block_hash import HashChain
from kvrelay.common.images import ImageSpan
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.decode_worker.scheduler import DecodeScheduler
from kvrelay.decode_worker.service import DataPorts, DecodeService
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.engine.fake.engine import fake_card
from kvrelay.engine.images.interface import ImageReader
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.leased_blocks import LeasedBlocks
from kvrelay.wire.blocks.pieces import whole_block
from kvrelay.wire.leases.lease import LeaseSettings, VerifiedLease
from kvrelay.wire.leases.table import LeaseTable
from kvrelay.wire.messages import Commit, Grant, Offer, Reject, Role, Submit
from kvrelay.wire.metrics import WireMetrics
from tests.worker.rig import EPOCH, ServiceRig

CARD = fake_card()
FINGERPRINT = CARD.layout.fingerprint()
BLOCK = CARD.layout.block_size


def submit(name: str, num_tokens: int = 6, max_tokens: int = 3) -> Submit:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    tokens = list(range(num_tokens))
    return Submit(request_id=name, attempt=1, token_ids=tokens, num_prompt_tokens=num_tokens, sampling=sampling)


def offer(
    name: str, token_ids: list[int], num_prompt_tokens: int | None = None, images: Sequence[ImageSpan] = ()
) -> Offer:
    return Offer(
        request_id=name,
        attempt=1,
        gateway_id="gateway",
        fingerprint=FINGERPRINT,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        sampling=SamplingParams(max_tokens=8, temperature=0.0),
        block_hashes=HashChain(FINGERPRINT, BLOCK, images=images).hashes_of_all(token_ids),
        images=list(images),
    )


def commit_of(granted: Grant, first_token: SampledToken, chain_hash: bytes = b"", position_offset: int = 0) -> Commit:
    return Commit(
        lease_id=granted.lease_id,
        epoch=EPOCH,
        chain_hash=chain_hash,
        first_token=first_token,
        num_cached_tokens=0,
        position_offset=position_offset,
    )


class Rig(ServiceRig[DecodeService]):
    """A decode worker."""

    def __init__(self, reader: ImageReader | None = None, **settings: int) -> None:
        blocks = BlockManager(CARD.num_blocks, BLOCK, lambda: 0.0)
        self.scheduler = DecodeScheduler(DecodeSchedulerSettings(**settings), blocks, CARD.max_model_len, "cpu")
        card = CARD if reader is None else msgspec.structs.replace(CARD, no_images="")
        super().__init__(card, blocks, self.scheduler, DecodeService, reader)
        leases = LeaseTable(
            LeaseSettings(EPOCH, FINGERPRINT, BLOCK, whole_block(CARD.block_nbytes), 30.0),
            LeasedBlocks(self.blocks),
            self.engine.store,
            self.service,
            WireMetrics(CollectorRegistry()),
            self.clock,
        )
        self.service.attach(leases, DataPorts("tcp://nowhere:1"))

    def submit(self, name: str, max_tokens: int = 3) -> Submit:
        return submit(name, max_tokens=max_tokens)

    def grant(self, made: Offer) -> Grant:
        """Offer a hand-off, which must be granted."""
        self.ask(made, "prefill", Role.PREFILL)
        granted = self.sent[-1][1]
        assert isinstance(granted, Grant)
        return granted

    def verify(self, granted: Grant, made: Offer, first_token: int, position_offset: int = 0) -> None:
        """Verify the lease. No block is sent: the tests look only at the sequence that the verified lease becomes."""
        owner = next(owner for owner in self.blocks.owners() if owner.kind == "lease")
        chain = HashChain(FINGERPRINT, BLOCK, images=made.images)
        commit = commit_of(granted, SampledToken(first_token), position_offset=position_offset)
        block_tables = [self.blocks.owned_blocks(owner)]
        self.service.on_lease_verified(
            VerifiedLease(granted.lease_id, owner.key, "prefill", made, chain, commit, block_tables, 0.1)
        )

    def reject(self, made: Offer, first_token: SampledToken, position_offset: int = 0) -> Reject:
        """Commit a hand-off without blocks. It must be rejected."""
        commit = commit_of(self.grant(made), first_token, made.block_hashes[-1], position_offset)
        self.ask(commit, "prefill", Role.PREFILL)
        rejected = self.sent[-1][1]
        assert isinstance(rejected, Reject)
        return rejected
