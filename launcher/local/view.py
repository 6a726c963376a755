"""The display of ``kvrelay local``: each component's state, and its log lines with its name before them.

On a terminal a table stays below the log. Below it is the picture of ``kvrelay top``, if the gateway requires no key. Without a
terminal, each change of state is a line. The supervisor's threads call the view. It never fails them: serving goes on without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvrelay.launcher.local.supervisor import State, Status
from kvrelay.launcher.top import Picture

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")
_COLUMNS = ("component", "state", "for", "memory", "restarts")
_STATE_STYLES = {
    State.LOADING: "yellow",
    State.READY: "bold green",
    State.UNREADY: "bold yellow",
    State.DIED: "bold red",
    State.STOPPED: "dim",
}


def describe(status: Status) -> str:
    """A status in words, without the component's name."""
    parts = [status.state.value]
    if status.state is State.READY and status.load_s is not None:
        parts.append("again" if status.is_back else f"after {status.load_s:.1f} s")
    if status.state is State.DIED:
        # A component that was never ready is not restarted: its next start would fail the same way.
        parts.append(f"({status.detail})" + ("; it is started again" if status.load_s is not None else ""))
    if status.rss_bytes is not None and status.state is State.READY:
        parts.append(f"({status.rss_bytes / 2**20:.0f} MiB)")
    return " ".join(parts)


class View:
    """Shows a deployment between enter and exit. Implements :class:`kvrelay.launcher.local.supervisor.Observer`."""

    def __init__(
        self, console: Console, statuses: Callable[[], list[Status]], picture: Picture, *, hide_logs: bool
    ) -> None:
        """``statuses`` and ``picture`` (of the gateway) are read whenever the table is drawn."""
        self._console = console
        self._statuses = statuses
        self._picture = picture
        self._hide_logs = hide_logs
        self._colours: dict[str, str] = {}

    @contextlib.contextmanager
    def shown(self) -> Iterator[Self]:
        """Show the table at the bottom of a terminal inside the context."""
        if not self._console.is_terminal:
            yield self
            return
        live = Live(console=self._console, get_renderable=self._table, refresh_per_second=4, transient=True)
        with self._picture.watched():
            live.start()
            try:
                yield self
            finally:
                with contextlib.suppress(OSError, ValueError):
                    live.stop()

    def on_line(self, name: str, line: str) -> None:
        """Print ``prefill-0 | line``."""
        if not self._hide_logs:
            colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
            self._print(Text.assemble((f"{name:<9} ", colour), ("| ", "dim"), line))

    def on_state(self, status: Status) -> None:
        """Print ``kvrelay   | prefill-0: ready after 3.1 s (412 MiB)``. If a table shows the states, print only deaths."""
        if status.state is State.DIED or not self._console.is_terminal:
            self._print(Text(f"kvrelay   | {status.name}: {describe(status)}", _STATE_STYLES[status.state]))

    def say(self, text: str) -> None:
        """Print a message of the launcher."""
        self._print(Text(text))

    def _print(self, text: Text) -> None:
        # If the reader of the output is gone, rich would end the program.
        with contextlib.suppress(OSError, ValueError, SystemExit):
            self._console.print(text, soft_wrap=True)

    def _table(self) -> Group:
        table = Table(box=None, padding=(0, 2), header_style="dim")
        for title in _COLUMNS:
            table.add_column(title)
        for status in self._statuses():
            memory = "" if status.rss_bytes is None else f"{status.rss_bytes / 2**20:.0f} MiB"
            state = Text(status.state.value, style=_STATE_STYLES[status.state])
            if status.detail:
                state.append(f" ({status.detail})", style="red")
            restarts = str(status.num_restarts or "")
            table.add_row(status.name, state, f"{status.state_s:.0f} s", memory, restarts)
        return Group(table, self._picture.last)
