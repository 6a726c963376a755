"""The process of one rank: joins its leader's group, loads its part of the model, does what it is told, ends with its leader.

Started by :mod:`kvrelay.engine.ranks.process` with the numbers of four descriptors: its link, those of its blocks and of its
adapters, and memory (``RankProcess.pool_memory``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

from kvrelay.engine.ranks.link import Link
from kvrelay.engine.ranks.messages import (
    AGREE_S,
    Alive,
    Copy,
    Failed,
    Go,
    Launch,
    Load,
    Loaded,
    Logged,
    Ready,
    Sample,
    ToRank,
)
from kvrelay.engine.step.interface import Engine, LaunchedStep

if TYPE_CHECKING:
    from kvrelay.engine.ranks.group import RankGroup

logger = logging.getLogger(__name__)

_ALIVE_S = 1.0


class _ToLeader(logging.Handler):
    """Lines for the leader's log."""

    def __init__(self, link: Link[ToRank]) -> None:
        super().__init__(logging.WARNING)
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # the leader is gone
            self._link.send(Logged(record.levelno, self.format(record)))


class _Pulse:
    """Gives signs of life, and ends the process with its leader, also in the middle of a step."""

    def __init__(self, link: Link[ToRank]) -> None:
        """Starts at once."""
        self.group: RankGroup | None = None  # once it is joined
        self._link = link
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while not self._link.is_over(_ALIVE_S):
            with contextlib.suppress(OSError):
                self._link.send(Alive(0 if self.group is None else self.group.num_meetings))
        os._exit(1)


def main(link_descriptor: int, blocks_descriptor: int, adapters_descriptor: int, pool_memory: int) -> NoReturn:
    """Serve the leader."""
    link: Link[ToRank] = Link(socket.socket(fileno=link_descriptor), ToRank)
    pulse = _Pulse(link)
    logging.basicConfig(handlers=[_ToLeader(link)], force=True)
    code = 0
    try:
        _serve(_load(link, blocks_descriptor, adapters_descriptor, pool_memory, pulse), link)
    except EOFError:
        pass
    except Exception:
        logger.exception("ending")
        code = 1
    os._exit(code)  # the interpreter's own end would wait for collectives that nobody joins any more


def _load(
    link: Link[ToRank], blocks_descriptor: int, adapters_descriptor: int, pool_memory: int, pulse: _Pulse
) -> Engine:
    def meet() -> None:
        link.send(Ready())
        told = link.receive()
        assert isinstance(told, Go), f"the leader says {told}, which this rank waits for"

    load = link.receive()
    assert isinstance(load, Load), f"the leader begins with {load}"
    try:
        # torch takes seconds to import, in which the process must give signs of life.
        from kvrelay.engine.backends.options import device_of  # noqa: PLC0415
        from kvrelay.engine.factory import load_part  # noqa: PLC0415
        from kvrelay.engine.kv.copies import CudaCopies  # noqa: PLC0415
        from kvrelay.engine.models.ranks import RankPart  # noqa: PLC0415
        from kvrelay.engine.ranks.adapters import AdapterServer, ToAdapters  # noqa: PLC0415
        from kvrelay.engine.ranks.blocks import BlockServer, ToBlocks  # noqa: PLC0415
        from kvrelay.engine.ranks.group import Meeting  # noqa: PLC0415

        meeting = Meeting.find(os.environ)
        meet()
        pulse.group = meeting.join(device_of(load.settings.model.device))
        part = RankPart(meeting.cut, pulse.group, meet, pool_memory)
        engine = load_part(load.settings, part, lambda done, total: None)
        if engine.blocks.device.type == "cuda":
            blocks: Link[ToBlocks] = Link(socket.socket(fileno=blocks_descriptor), ToBlocks)
            server = BlockServer(blocks, engine.blocks, pool_memory, CudaCopies(engine.blocks.device))
            threading.Thread(target=server.serve, daemon=True).start()
        if engine.adapters is not None:
            adapters: Link[ToAdapters] = Link(socket.socket(fileno=adapters_descriptor), ToAdapters)
            threading.Thread(target=AdapterServer(adapters, engine.adapters).serve, daemon=True).start()
    except Exception as error:
        link.send(Failed(str(error)))
        raise
    link.send(Loaded(engine.card))
    return engine


def _serve(engine: Engine, link: Link[ToRank]) -> None:
    step: LaunchedStep | None = None
    while (message := link.receive()) is not None:
        if isinstance(message, Failed | Load):
            raise RuntimeError(f"the leader says {message}, where this rank could do what it was told")
        try:
            match message:
                case Launch(plan):
                    step = engine.launch(plan)
                case Sample(inputs):
                    assert step is not None, "the leader samples what was not launched"
                    step.sample(inputs)
                case Copy(pairs):
                    engine.copy_blocks(pairs)
        except Exception as error:
            link.send(Failed(str(error)))
            if not isinstance(link.receive(AGREE_S), Failed):
                raise


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
