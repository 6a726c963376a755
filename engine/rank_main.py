"""The process of one rank: joins its leader's group, loads its part of the model, follows the leader, and ends with it.

On the leader's host :mod:`kvrelay.engine.ranks.process` starts it with three descriptors: its link, the link for blocks, and memory
that the leader shares. On another host :mod:`kvrelay.engine.ranks.host` starts it with two descriptors, a line to that process and
a pipe with the secret, and with the directories of the model and the adapters. Its links then go to the leader over TCP.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from kvrelay.common.errors import KvrelayError
from kvrelay.engine.ranks.adapters import RankAdapters
from kvrelay.engine.ranks.arrival import Host, NoLeaderError, find_leader
from kvrelay.engine.ranks.link import Link
from kvrelay.engine.ranks.messages import (
    AGREE_S,
    ALIVE_S,
    Alive,
    Copy,
    Draft,
    Failed,
    GiveUpDrafts,
    Go,
    Launch,
    Leave,
    Leaving,
    Load,
    LoadAdapter,
    Loaded,
    Logged,
    NotLoaded,
    Profile,
    Ready,
    Sample,
    ToRank,
    UnloadAdapter,
    may_be_theirs,
)
from kvrelay.engine.ranks.nodes import HostDirectories
from kvrelay.engine.ranks.stages import LastStage
from kvrelay.engine.step.interface import LaunchedStep
from kvrelay.engine.step.plan import StepPlan

if TYPE_CHECKING:
    import torch

    from kvrelay.engine.config.cut import Cut
    from kvrelay.engine.ranks.group import RankGroup
    from kvrelay.engine.torch_engine import TorchEngine

logger = logging.getLogger(__name__)


class _Lines(logging.Handler):
    """Sends log lines to another process."""

    def __init__(self, send: Callable[[Logged], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # it is gone
            self._send(Logged(record.levelno, self.format(record)))


class _Pulse:
    """Sends signs of life, and ends the process when its leader ends, also in the middle of a step."""

    def __init__(self, link: Link[ToRank]) -> None:
        """Starts at once."""
        self.group: RankGroup | None = None  # set once the group is joined
        self.share_read = 0.0  # of the weights
        self._link = link
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while not self._link.is_over(ALIVE_S):
            with contextlib.suppress(OSError):
                self._link.send(Alive(0 if self.group is None else self.group.num_meetings, self.share_read))
        os._exit(1)


@dataclass(frozen=True, slots=True)
class Ends:
    """The rank's connections to its leader."""

    link: Link[ToRank]
    pulse: _Pulse
    environment: Mapping[str, str]  # torchrun's variables
    carry: Callable[
        [], Callable[[torch.Tensor], None]
    ]  # begins to serve blocks; returns a function that takes the pool once it exists
    pool_memory: int | None = None  # a descriptor, if the leader shares memory
    directories: HostDirectories | None = None  # this host's directories, if it is not the leader's host


def here(link_descriptor: int, blocks_descriptor: int, pool_memory: int) -> Ends:
    """The connections on the leader's host."""

    def carry() -> Callable[[torch.Tensor], None]:
        from kvrelay.engine.kv.device.copies import CudaCopies  # noqa: PLC0415 - torch takes seconds to import
        from kvrelay.engine.ranks.blocks import BlockServer, ToBlocks  # noqa: PLC0415

        def take(pool: torch.Tensor) -> None:
            if pool.device.type == "cuda":  # otherwise the leader can access the pool itself
                blocks: Link[ToBlocks] = Link(socket.socket(fileno=blocks_descriptor), ToBlocks)
                server = BlockServer(blocks, pool, pool_memory, CudaCopies(pool.device))
                threading.Thread(target=server.serve, daemon=True).start()

        return take

    link: Link[ToRank] = Link(socket.socket(fileno=link_descriptor), ToRank)
    logging.basicConfig(handlers=[_Lines(link.send)], format="%(message)s", force=True)
    return Ends(link, _Pulse(link), os.environ, carry, pool_memory)


def there(host_descriptor: int, secret_descriptor: int, directories: HostDirectories) -> Ends:
    """The connections on another host. Waits for a leader. Raises NoLeaderError."""
    host = Host(Link(socket.socket(fileno=host_descriptor), Leave))
    logging.basicConfig(handlers=[_Lines(host.send)], format="%(message)s", force=True)
    with open(secret_descriptor, "rb") as file:
        secret = file.read()
    link, blocks, meeting = find_leader(os.environ, secret)
    host.leave = lambda: link.send(Leaving())

    def carry() -> Callable[[torch.Tensor], None]:
        from kvrelay.engine.kv.device.copies import CudaCopies  # noqa: PLC0415 - torch takes seconds to import
        from kvrelay.engine.ranks.carried import BlockCarrier, ToCarrier  # noqa: PLC0415

        carrier = BlockCarrier(blocks.then(ToCarrier))

        def serve() -> NoReturn:
            try:
                logger.error("ending: %s", carrier.serve())
            except Exception:
                logger.exception("ending: blocks cannot be carried any more")
            os._exit(1)

        def take(pool: torch.Tensor) -> None:
            carrier.give(pool, CudaCopies(pool.device) if pool.device.type == "cuda" else None)

        threading.Thread(target=serve, daemon=True).start()
        return take

    logging.getLogger().addHandler(_Lines(link.send))
    return Ends(link, _Pulse(link), {**os.environ, **meeting}, carry, directories=directories)


def main(arguments: list[str]) -> NoReturn:
    """Serve the leader."""
    code = 0
    try:
        match arguments:
            case [host, secret, "--model", model, *more]:
                ends = there(int(host), int(secret), HostDirectories(model, *more[1:]))
            case [link, blocks, memory]:
                ends = here(int(link), int(blocks), int(memory))
        _serve(*_load(ends), ends.link)
    except EOFError:
        pass
    except NoLeaderError as error:
        logger.warning("%s", error)
        code = 1
    except Exception:
        logger.exception("ending")
        code = 1
    os._exit(code)  # a normal exit would wait for collectives that no rank joins any more


def _load(ends: Ends) -> tuple[TorchEngine, Cut, RankAdapters | None]:
    """The rank's part of the model, its cut, and its adapters."""
    link = ends.link

    def meet(told: bytes = b"") -> bytes:
        assert not told, "only the leader tells the others something"
        link.send(Ready())
        go = link.receive()
        assert isinstance(go, Go), f"the leader says {go}, and this rank waits for its word to go on"
        return go.told

    def progress(done: int, total: int) -> None:
        ends.pulse.share_read = done / max(1, total)

    load = link.receive()
    assert isinstance(load, Load), f"the leader begins with {load}"
    settings = load.settings
    own = ends.directories
    try:
        if own is not None:
            settings = msgspec.structs.replace(settings, model=own.over(settings.model))
        # torch takes seconds to import, in which the process must give signs of life.
        from kvrelay.engine.backends.options import device_of  # noqa: PLC0415
        from kvrelay.engine.config.cut import cuts_of  # noqa: PLC0415
        from kvrelay.engine.factory import load_part  # noqa: PLC0415
        from kvrelay.engine.models.ranks import RankPart  # noqa: PLC0415
        from kvrelay.engine.ranks.group import Meeting  # noqa: PLC0415

        give_blocks = ends.carry()
        meeting = Meeting.find(ends.environment)
        cut = cuts_of(settings.model.tensor_parallel, settings.model.pipeline_parallel)[meeting.rank]
        meet()
        ends.pulse.group = group = meeting.join(device_of(settings.model.device), cut)
        part = RankPart(cut, group, meet, meeting.local.num_ranks, ends.pool_memory, line=group)
        engine = load_part(settings, part, progress)
        give_blocks(engine.blocks)
        adapters: RankAdapters | None = None
        if engine.adapters is not None:
            root = None if own is None or own.adapters is None else Path(own.adapters)
            adapters = RankAdapters(engine.adapters, root, link.send)
    except Exception as error:
        reason = str(error) if isinstance(error, KvrelayError) else f"{type(error).__name__}: {error}"
        link.send(NotLoaded(reason, may_be_theirs(error)))
        raise
    link.send(Loaded(engine.card))
    return engine, cut, adapters


def _serve(engine: TorchEngine, cut: Cut, adapters: RankAdapters | None, link: Link[ToRank]) -> None:
    def receive(timeout_s: float | None = None) -> ToRank | None:
        """The next message that is not about adapters, which are handled here."""
        while isinstance(message := link.receive(timeout_s), LoadAdapter | UnloadAdapter):
            assert adapters is not None, f"the leader says {message}, and this rank serves no adapters"
            adapters.take(message)
        return message

    launch: Callable[[StepPlan], LaunchedStep | None] = engine.launch
    if cut.num_stages > 1 and cut.is_last:
        launch = LastStage(engine, link.send if cut.rank == 0 else None).launch
    step: LaunchedStep | None = None
    while (message := receive()) is not None:
        if isinstance(message, Failed | Load):
            raise RuntimeError(f"the leader says {message}, where this rank could do what it was told")
        try:
            match message:
                case Launch(plan):
                    step = launch(plan)
                case Sample(inputs):
                    assert step is not None, "the leader samples what was not launched"
                    step.sample(inputs)
                case Copy(pairs):
                    engine.copy_blocks(pairs)
                case Draft(asks):
                    assert engine.head is not None, "the leader drafts with what this rank does not have"
                    engine.head.draft_told(asks)
                case GiveUpDrafts():
                    assert engine.head is not None, "the leader drafts with what this rank does not have"
                    engine.head.give_up()
                case Profile(num_steps):
                    engine.profiler.ask(num_steps, cut.number)
        except Exception as error:
            link.send(Failed(str(error)))
            if not isinstance(receive(AGREE_S), Failed):
                raise


if __name__ == "__main__":
    main(sys.argv[1:])
