"""The process of one rank: joins its leader's group, loads its part of the model, does what it is told, ends with its leader.

Started by :mod:`kvrelay.engine.ranks.process` with the numbers of two descriptors: its link, and the memory for its KV pool.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from typing import NoReturn

from kvrelay.engine.ranks.link import Link
from kvrelay.engine.ranks.messages import (
    AGREE_S,
    Alive,
    Copy,
    Failed,
    Joining,
    Launch,
    Load,
    Loaded,
    Logged,
    Sample,
    ToRank,
)
from kvrelay.engine.step.interface import Engine, LaunchedStep

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


def main(link_descriptor: int, pool_memory: int) -> NoReturn:
    """Serve the leader."""
    link: Link[ToRank] = Link(socket.socket(fileno=link_descriptor), ToRank)
    threading.Thread(target=_live, args=(link,), daemon=True).start()
    logging.basicConfig(handlers=[_ToLeader(link)], force=True)
    code = 0
    try:
        _serve(_load(link, pool_memory), link)
    except EOFError:
        pass
    except Exception:
        logger.exception("ending")
        code = 1
    os._exit(code)  # the interpreter's own end would wait for collectives that nobody joins any more


def _live(link: Link[ToRank]) -> None:
    """Give signs of life, and end with the leader, also in the middle of a step."""
    while not link.is_over(_ALIVE_S):
        with contextlib.suppress(OSError):
            link.send(Alive())
    os._exit(1)


def _load(link: Link[ToRank], pool_memory: int) -> Engine:
    load = link.receive()
    assert isinstance(load, Load), f"the leader begins with {load}"
    try:
        # torch takes seconds to import, in which the process must give signs of life.
        from kvrelay.engine.factory import load_part  # noqa: PLC0415
        from kvrelay.engine.models.ranks import RankPart  # noqa: PLC0415
        from kvrelay.engine.ranks.group import Meeting  # noqa: PLC0415

        meeting = Meeting.find(os.environ)
        link.send(Joining())
        part = RankPart(meeting.cut, meeting.join(), pool_memory)
        engine = load_part(load.settings, part, lambda done, total: None)
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
    main(int(sys.argv[1]), int(sys.argv[2]))
