"""``kvrelay top``: shows in a terminal what a gateway and its workers do at the moment, from the gateway's ``/debug/live``.

On a terminal it runs until Ctrl-C, even while the gateway is away. Otherwise it prints one picture and ends.
"""

from __future__ import annotations

import json
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvrelay.common.errors import SettingsError
from kvrelay.launcher.errors import AnswerError, refused

_TIMEOUT_S = 10.0  # without data
_AGAIN_S = 1.0
_STATE_STYLES = {"up": "green", "leaving": "yellow", "misfit": "red", "down": "bold red"}
_PARTS = ("accept", "queue", "prefill")  # of the time to the first token
_LATER_PARTS = ("transfer", "first_step")  # from the first token to the second


def run(url: str, api_key: str | None, console: Console) -> int:
    """Show the picture. Raises SettingsError on an invalid URL, AnswerError if the gateway does not answer or refuses."""
    request = _request(url, api_key)
    if not console.is_terminal:
        pictures = _pictures(request)
        next(pictures)  # the first one may have no rates yet
        console.print(next(pictures))
        return 0
    picture: RenderableType = Text(f"{url} …")
    with Live(picture, console=console, screen=True, auto_refresh=False) as live:
        has_shown = False
        while True:
            try:
                for picture in _pictures(request):
                    live.update(picture, refresh=True)
                    has_shown = True
            except AnswerError as error:
                if not has_shown:
                    raise
                live.update(Group(Text(f"{error}; trying again", "bold red"), picture), refresh=True)
            time.sleep(_AGAIN_S)


class Picture:
    """Keeps the latest picture of our own gateway, for a view that shows it beside other content. Empty while there is none."""

    def __init__(self, url: str) -> None:
        """Raises SettingsError on an invalid URL."""
        self.last: RenderableType = ""  # may be read on any thread
        self._request = _request(url, None)
        # The certificate is for the name that clients use, so it is not checked: we started the gateway.
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Update the picture on a separate thread until the context ends, whether or not the gateway answers."""
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.is_set():
                with suppress(AnswerError):
                    for picture in _pictures(self._request, self._tls):
                        self.last = picture
                        if is_over.is_set():
                            return
                self.last = ""
                is_over.wait(_AGAIN_S)

        threading.Thread(target=watch, name="picture", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()


def render(known: dict[str, Any], state: dict[str, Any]) -> Group:
    """The last ``roster`` and ``state`` of the feed (gateway/desk/snapshot.py) for a terminal."""
    figures = state["figures"]
    cached = "-" if figures["cached"] is None else f"{figures['cached']:.0%}"
    head = Text.assemble(
        (f"kvrelay {known['version']} ", "bold"), (f"{_plain(', '.join(known['models']))}   ", "cyan"),
        f"{state['num_running']} running   {state['num_queued']} queued   {figures['prompt_tokens_per_s']} prompt and "
        f"{figures['output_tokens_per_s']} output tokens/s   {cached} cached",
    )  # fmt: skip
    first, second = (_sum(figures["parts_s"], names) for names in (_PARTS, _LATER_PARTS))
    parts = "; ".join(part for part in (first, second and f"then {second}") if part)
    (ttft, ttft_95), (itl, itl_99) = figures["ttft_s"], figures["itl_s"]
    times = Text(
        f"first token {_ms(ttft)} ms, 95 %: {_ms(ttft_95)}{f' ({parts})' if parts else ''}   "
        f"between tokens {_ms(itl)} ms, 99 %: {_ms(itl_99)}"
    )
    errors = [
        Text(f"{time.strftime('%H:%M:%S', time.localtime(at))}  {status}  {_plain(what)}  {_plain(request_id)}", "red")
        for at, request_id, status, what in state["errors"]
    ]
    return Group(head, times, _workers(known["workers"], state), *errors)


def _sum(parts_s: dict[str, float], names: tuple[str, ...]) -> str:
    """The parts of these names that are known, as a sum; empty without any."""
    return " + ".join(f"{name} {_ms(parts_s[name])}" for name in names if name in parts_s)


def _workers(known: list[dict[str, Any]], state: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("worker", no_wrap=True)
    shows_models = len({worker["model"] for worker in known}) > 1
    if shows_models:
        table.add_column("model")
    for title in ("role", "state"):
        table.add_column(title)
    for title in ("running", "waiting", "tokens\nwaiting", "KV in\nuse", "prompt\ntokens/s", "handed\nover/s"):
        table.add_column(title, justify="right")
    handed = [0] * len(known)
    for prefill, _, tokens_per_s in state["flows"]:
        if prefill >= 0:
            handed[prefill] += tokens_per_s
    for worker, load, tokens_per_s in zip(known, state["workers"], handed, strict=False):
        name, breaker, num_running, num_waiting, num_waiting_tokens, num_used, speed = load
        word = Text(_plain(name), _STATE_STYLES.get(name, ""))
        if breaker != "closed":
            word.append(f", breaker {_plain(breaker)}", "bold red")
        if worker.get("problem"):
            word.append(f" ({_plain(worker['problem'])})", "red")
        most, num_blocks = worker.get("max_running"), worker.get("num_blocks")
        table.add_row(
            Text(_plain(worker.get("name") or worker["address"])),
            *([Text(_plain(worker["model"]))] if shows_models else []),
            Text(_plain(worker["role"])),
            word,
            f"{num_running}/{most}" if most else str(num_running),
            str(num_waiting or ""),
            str(num_waiting_tokens or ""),
            f"{num_used / num_blocks:.0%}" if num_blocks else "",
            "" if speed is None else str(speed),
            str(tokens_per_s or ""),
        )
    return table


def _plain(text: str) -> str:
    """``text`` without characters that control the terminal."""
    return "".join(one if one.isprintable() else "?" for one in text)


def _ms(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s * 1000:.3g}" if value_s < 1 else f"{value_s * 1000:.0f}"


def _pictures(request: urllib.request.Request, tls: ssl.SSLContext | None = None) -> Iterator[Group]:
    """One picture for each state that the gateway sends. ``tls``: how its certificate is checked; None: as usual.

    Raises AnswerError when the gateway does not answer, or the stream ends.
    """
    # Do not ask a proxy for addresses on this machine.
    is_here = urlsplit(request.full_url).hostname in ("127.0.0.1", "localhost", "::1")
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=tls)]
    if is_here:
        handlers.append(urllib.request.ProxyHandler({}))
    opener = urllib.request.build_opener(*handlers)
    known: dict[str, Any] = {}
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            name = b""
            for line in answer:
                field, _, value = line.strip().partition(b": ")
                if field == b"event":
                    name = value
                elif field == b"data" and name == b"roster":
                    known = json.loads(value)
                elif field == b"data" and name == b"state":
                    yield render(known, json.loads(value))
    except urllib.error.HTTPError as error:
        with error:
            raise refused(request.full_url, error.code, error.read(2**16), wants_operator=True) from error
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        way_out = "start a gateway there (`kvrelay local`), or name another URL"
        if isinstance(reason, ssl.SSLCertVerificationError):
            way_out = "SSL_CERT_FILE=ca.crt names an authority of your own"
        raise AnswerError(f"{request.full_url} does not answer ({reason}); {way_out}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise AnswerError(f"{request.full_url} is no gateway of this version ({error!r})") from error
    raise AnswerError(f"{request.full_url} has ended the stream")


def _request(url: str, api_key: str | None) -> urllib.request.Request:
    base = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        parts = urlsplit(base)
    except ValueError as error:
        raise SettingsError(f"URL is {url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsError(f"URL is {url!r}; write http://HOST:PORT or https://HOST")
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    return urllib.request.Request(f"{base}/debug/live", headers=headers)  # noqa: S310 - the scheme is checked above
