"""The use of each API key: tokens as metrics and, with ``--access-log``, one log line per request. Never logs a text or a key."""

from __future__ import annotations

import logging

from kvrelay.common.clock import Clock
from kvrelay.gateway.http.request import ApiRequest
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.text.output import total

logger = logging.getLogger(__name__)


class Access:
    """The access log and token metrics of one gateway. Implements :class:`kvrelay.gateway.http.edge.Observer`."""

    def __init__(self, metrics: GatewayMetrics, clock: Clock, *, is_logged: bool) -> None:
        """``clock``: the clock of requests."""
        self._key_tokens = metrics.key_tokens
        self._clock = clock
        self._is_logged = is_logged

    def begin(self, request: ApiRequest) -> None:
        """Does nothing: the use is known at the end."""

    def end(self, request: ApiRequest, route: str) -> None:
        """Count the tokens of a request that got some. Log the request if it was a POST, also if it was not let in."""
        usage = total(request.sequences, request.usages)
        begun_s = [one.timings.first_token_s for one in request.sequences if one.timings.first_token_s is not None]
        # The first token of any prompt: prompts of one body need not begin in order.
        first_token_s = min(begun_s, default=None)
        if request.key_name is not None and first_token_s is not None:
            for kind, num_tokens in (
                ("prompt", usage.num_prompt_tokens),
                ("completion", usage.num_output_tokens),
                ("cached", usage.num_cached_tokens),
            ):
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
