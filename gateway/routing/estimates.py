"""Estimates for one line of requests: how many tokens a request will hold, how long it waits for a place, and how long it has it.

Lives on the gateway's asyncio loop. Times are seconds on one clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrelay.gateway.routing.asked import Asked
from kvrelay.gateway.routing.forecast import Forecast, Need, Pace, Served, Supply

_FORECAST_S = 0.25  # how long a forecast of the whole line is reused and extended


class Estimates:
    """Knows the requests that have places, and what earlier ones cost. Whoever keeps the line says which requests come before."""

    def __init__(self, supply: Callable[[], Supply]) -> None:
        """``supply``: what the workers have free now."""
        self._supply = supply
        self._pace = Pace()
        self._running: dict[Asked, float] = {}  # when they got their places
        self._forecast: tuple[float, Forecast] | None = None  # when it was made, and the forecast of the whole line

    @property
    def num_running(self) -> int:
        """The number of requests that have a place."""
        return len(self._running)

    def num_to_hold(self, asked: Asked) -> float:
        """The tokens of prompt and output that a request will hold."""
        return asked.num_prompt_tokens + self._pace.output_tokens(asked.kind, asked.max_tokens)

    def service_s(self, asked: Asked, now_s: float) -> float | None:
        """How long a request has its place; None if unknown."""
        return self._pace.service_s(asked.kind, asked.num_prompt_tokens, asked.max_tokens, now_s)

    def wait_s(self, asked: Asked, before: Sequence[Asked], now_s: float, *, is_last: bool) -> float | None:
        """How long a request waits behind those ``before`` it, which are all of the line if it ``is_last``; None if unknown."""
        place_s = self._forecast_behind(before, now_s, is_whole=is_last).copy().place(self._need(asked))
        return None if place_s is None else place_s - now_s

    def on_joined(self, asked: Asked, *, is_last: bool) -> None:
        """A request has joined the line."""
        if self._forecast is not None and is_last:
            self._forecast[1].place(self._need(asked))
        else:
            self._forecast = None

    def on_placed(self, asked: Asked, now_s: float) -> None:
        """A request got its place."""
        self._running[asked] = now_s

    def on_end(self, asked: Asked, num_output_tokens: int, first_token_s: float | None, now_s: float) -> None:
        """A request that had a place is over. ``first_token_s``: time of its first token; None if there was none."""
        placed_s = self._running.pop(asked)
        # Also counts requests that a stop string or the client ended: they cost as much.
        if num_output_tokens and first_token_s is not None:
            served = Served(asked.num_prompt_tokens, num_output_tokens, first_token_s - placed_s, now_s - placed_s)
            self._pace.on_served(asked.kind, served, now_s)

    def _need(self, asked: Asked) -> Need:
        return Need(asked.num_to_compute, self.num_to_hold(asked), self._pace.durations_s(asked.kind))

    def _forecast_behind(self, before: Sequence[Asked], now_s: float, *, is_whole: bool) -> Forecast:
        """A forecast in which the requests of ``before`` have got their places."""
        if is_whole and self._forecast is not None and now_s - self._forecast[0] < _FORECAST_S:
            return self._forecast[1]
        running = [(self._need(asked), since_s) for asked, since_s in self._running.items()]
        forecast = Forecast(self._supply(), running, now_s)
        for asked in before:
            forecast.place(self._need(asked))
        if is_whole:
            self._forecast = (now_s, forecast)
        return forecast
