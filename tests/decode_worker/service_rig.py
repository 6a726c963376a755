"""The decode worker's service. The test plays the model thread and the prefill workers."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from kvrelay.common.block_hash import HashChain
from kvrelay.common.sampling import SamplingParams
from kvrelay.decode_worker.scheduler import DecodeScheduler
from kvrelay.decode_worker.service import DataPorts, DecodeService
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.engine.fake.engine import fake_card
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.leased_blocks import LeasedBlocks
from kvrelay.wire.blocks.pieces import whole_block
from kvrelay.wire.leases.lease import LeaseSettings
from kvrelay.wire.leases.table import LeaseTable
from kvrelay.wire.messages import Offer, Submit
from kvrelay.wire.metrics import WireMetrics
from tests.worker.rig import EPOCH, ServiceRig

CARD = fake_card()
FINGERPRINT = CARD.layout.fingerprint()
BLOCK = CARD.layout.block_size


def submit(name: str, num_tokens: int = 6, max_tokens: int = 3) -> Submit:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    tokens = list(range(num_tokens))
    return Submit(request_id=name, attempt=1, token_ids=tokens, num_prompt_tokens=num_tokens, sampling=sampling)


def offer(name: str, token_ids: list[int], num_prompt_tokens: int | None = None) -> Offer:
    return Offer(
        request_id=name,
        attempt=1,
        gateway_id="gateway",
        fingerprint=FINGERPRINT,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        sampling=SamplingParams(max_tokens=8, temperature=0.0),
        block_hashes=HashChain(FINGERPRINT, BLOCK).hashes_of_all(token_ids),
    )


class Rig(ServiceRig[DecodeService]):
    """A decode worker."""

    def __init__(self, **settings: int) -> None:
        blocks = BlockManager(CARD.num_blocks, BLOCK, lambda: 0.0)
        self.scheduler = DecodeScheduler(DecodeSchedulerSettings(**settings), blocks, CARD.max_model_len, "cpu")
        super().__init__(CARD, blocks, self.scheduler, DecodeService)
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
