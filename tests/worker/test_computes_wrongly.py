"""A worker whose model thread has reported that it computes wrongly."""

from __future__ import annotations

import asyncio

from kvrelay.wire.messages import Failed, FailureCode, Status, WorkerState
from kvrelay.worker.model_worker import Report
from tests.decode_worker.service_rig import Rig, submit


async def test_it_tells_its_gateways_takes_nothing_new_and_waits_for_nothing() -> None:
    rig = Rig()
    rig.service._key_tokens.join("gateway")
    rig.ask(submit("begun"))
    rig.service.on_report(Report(computes_wrongly=True))
    [status] = rig.told(Status)
    assert isinstance(status, Status)
    assert status.state is WorkerState.WRONG
    rig.ask(submit("new"))
    [refused] = rig.told(Failed)
    assert isinstance(refused, Failed)
    assert (refused.request_id, refused.code) == ("new", FailureCode.INTERNAL)
    await asyncio.wait_for(rig.service.drain(), 10)
    assert rig.service.status().state is WorkerState.WRONG
