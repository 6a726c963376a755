"""What a gateway knows of its workers, for whoever looks for the reason of something: ``GET /debug/workers``."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvrelay.gateway.model import Models
from kvrelay.gateway.routing.breaker import BreakerState


def known_workers(models: Models) -> dict[str, Any]:
    """All workers with what they have to do, who gets probes only, how many requests wait, and which ways prompts went."""
    workers, pairs = [], []
    ways: Counter[tuple[str, str]] = Counter()
    for model in models:
        states = model.relay.breakers.states()
        for worker in model.pool.workers:
            view = worker.view(0)
            workers.append(
                {
                    "model": model.name,
                    "role": worker.role.value,
                    "address": worker.address,
                    "is_usable": worker.is_usable,
                    "problem": worker.misfit or ("" if worker.welcome is not None else worker.problem),
                    "breaker": states.get((worker.address,), BreakerState.CLOSED).value,
                    "num_requests": 0 if view is None else view.num_requests,
                    "num_waiting_tokens": 0 if view is None else view.num_waiting_tokens,
                    "prompt_tokens_per_s": None if view is None else view.tokens_per_s,
                    "num_free_blocks": 0 if view is None else view.num_free_blocks,
                }
            )
        ways += model.relay.prompt_ways
        pairs += [
            {"prefill": part[0], "decode": part[1], "breaker": state.value}
            for part, state in states.items()
            if len(part) == 2
        ]
    return {
        "workers": workers,
        "pairs": pairs,
        "num_queued": sum(model.relay.admission.num_queued for model in models),
        "prompt_ways": {f"{way}: {reason}": number for (way, reason), number in sorted(ways.items())},
    }
