"""The use of each API key: tokens as metrics and, with ``--access-log``, one log line per request. Never logs a text or a key."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import product

from kvrelay.common.clock import Clock
from kvrelay.gateway.http.request import ApiRequest
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.text.output import total

logger = logging.getLogger(__name__)

_KINDS = ("prompt", "completion", "cached")  # of tokens


class Access:
    """The access log and token metrics of one gateway. Implements :class:`kvrelay.gateway.http.edge.Observer`."""

    def __init__(self, metrics: GatewayMetrics, clock: Clock, models: Sequence[str], *, is_logged: bool) -> None:
        """``clock``: the clock of requests. ``models``: the names of all models."""
        self._models = models
        self._key_tokens = metrics.key_tokens
        self._clock = clock
        self._is_logged = is_logged

    def know(self, key_names: Iterable[str]) -> None:
        """Count from 0 on for these keys: Prometheus would miss the first request of a counter that begins with its tokens."""
        for labels in product(key_names, self._models, _KINDS):
            self._key_tokens.labels(*labels)

    def begin(self, request: ApiRequest) -> None:
        """Does nothing: the use is known at the end."""

    def end(self, request: ApiRequest, route: str) -> None:
        """Count what the request costs its key. Log it if it was a POST, also if it was not let in."""
        usage = total(request.sequences, request.usages)
        begun_s = [one.timings.first_token_s for one in request.sequences if one.timings.first_token_s is not None]
        # The first token of any prompt: prompts of one body need not begin in order.
        first_token_s = min(begun_s, default=None)
        if request.key_name is not None and (used := request.used()).num_prompt_tokens:
            counts = (used.num_prompt_tokens, used.num_output_tokens, used.num_cached_tokens)
            for kind, num_tokens in zip(_KINDS, counts, strict=True):
                self._key_tokens.labels(request.key_name, request.model, kind).inc(num_tokens)
        if not self._is_logged or request.method != "POST":
            return
        ttft_s = None if first_token_s is None else round(first_token_s - request.received_s, 4)
        fields = {
            "outcome": request.outcome,
            "model": request.model,
            "api_key": request.key_name,
            "prompt_tokens": usage.num_prompt_tokens,
            "completion_tokens": usage.num_output_tokens,
            "cached_tokens": usage.num_cached_tokens,
            "ttft_s": ttft_s,
            "total_s": round(self._clock() - request.received_s, 4),
        }
        logger.info("POST %s", route, extra={**request.log_context, "fields": fields})
