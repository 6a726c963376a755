"""Requests and tokens per second, from what components count."""

from __future__ import annotations

from kvrelay.launcher.local.traffic import Figures, Traffic

GATEWAY = (
    "kvrelay_requests_in_flight 3\nkvrelay_gateway_prompt_tokens_total {}\nkvrelay_gateway_output_tokens_total {}\n"
)
WORKER = "kvrelay_num_requests_running 2\nkvrelay_num_requests_waiting 1\nkvrelay_sampled_tokens_total {}\n"


def test_rates_are_those_between_two_looks() -> None:
    texts: dict[str, str | None] = {"http://g/metrics": GATEWAY.format(100, 10), "http://d/metrics": WORKER.format(10)}
    traffic = Traffic({"gateway": "http://g", "decode-0": "http://d"}, texts.get)
    traffic.look(1.0)
    assert traffic.figures == {}
    texts["http://g/metrics"], texts["http://d/metrics"] = GATEWAY.format(300, 50), WORKER.format(4)
    traffic.look(3.0)
    assert traffic.figures == {"gateway": Figures(3, 100.0, 20.0), "decode-0": Figures(3, 0.0, 0.0)}
    texts["http://d/metrics"] = None
    traffic.look(5.0)
    assert traffic.figures.keys() == {"gateway"}
