"""What the components of a deployment do just now, by their own metrics: requests, and tokens per second. For people who watch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from kvrelay.launcher.local.supervisor import own_answer

_EVERY_S = 2.0
# A gateway and a worker call the same things by different names.
_REQUESTS = ("kvrelay_requests_in_flight", "kvrelay_num_requests_running", "kvrelay_num_requests_waiting")
_PROMPT_TOKENS = ("kvrelay_gateway_prompt_tokens_total", "kvrelay_prompt_tokens_total")
_OUTPUT_TOKENS = ("kvrelay_gateway_output_tokens_total", "kvrelay_sampled_tokens_total")


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one component."""

    num_requests: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float


class Traffic:
    """Asks all components now and then while ``watched``; ``figures`` may be read on any thread."""

    def __init__(self, urls: Mapping[str, str], read: Callable[[str], str | None] | None = None) -> None:
        """``urls``: by component, what ``/metrics`` is under. ``read``: the text at a URL, None if nobody answers."""
        self._urls = urls
        self._read = read or own_answer
        self._totals: dict[str, tuple[float, float, float]] = {}  # when, and tokens of prompts and output up to then
        self.figures: dict[str, Figures] = {}  # of the components that answered twice in a row

    def look(self, now_s: float) -> None:
        """Ask all, at ``now_s``."""
        figures: dict[str, Figures] = {}
        totals: dict[str, tuple[float, float, float]] = {}
        for name, url in self._urls.items():
            text = self._read(f"{url}/metrics")
            if text is None:
                continue
            samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
            requests, prompt, output = (
                sum(sample.value for sample in samples if sample.name in names)
                for names in (_REQUESTS, _PROMPT_TOKENS, _OUTPUT_TOKENS)
            )
            totals[name] = (now_s, prompt, output)
            if (before := self._totals.get(name)) is not None and now_s > before[0]:
                took_s = now_s - before[0]
                # A component that was started again counts from zero.
                rates = [max(0.0, now - then) / took_s for now, then in ((prompt, before[1]), (output, before[2]))]
                figures[name] = Figures(int(requests), *rates)
        self._totals, self.figures = totals, figures

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look every two seconds, on a thread of its own."""
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(_EVERY_S):
                self.look(time.monotonic())

        threading.Thread(target=watch, name="traffic", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()
