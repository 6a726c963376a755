"""How requests are routed, and how hard they are tried."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.common.settings import setting


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """How requests are routed and how hard they are tried."""

    policy: str = setting(
        "prefix",
        "how workers are picked: who has the longest prefix of the prompt and is not clearly more loaded, or the least loaded",
        choices=("prefix", "least_loaded"),
    )
    prefix_map_blocks: int = setting(
        65536, "policy prefix: KV blocks of which the gateway remembers who has them; some 150 bytes each", minimum=1
    )
    local_prefill: str = setting(
        "sooner",
        "when decode workers compute prompts themselves: also beside prefill workers, if the first token comes sooner that way; "
        "only while no prefill worker is up; or never, with 503 until one is",
        choices=("sooner", "fallback", "never"),
    )
    max_attempts: int = setting(4, "attempts at one request before it fails, waits for room not counted", minimum=1)
    request_timeout_s: float = setting(
        600.0, "how long one request may take in all; X-Request-Timeout asks for less", unit="s", minimum=1
    )
    room_timeout_s: float = setting(
        60.0, "how long a request may wait for a worker with room before it gets 503", unit="s", minimum=0
    )
    max_queued: int = setting(1024, "requests that may wait for a worker with room; one more gets 503", minimum=1)
    max_sequences: int = setting(
        128, "sequences that one request may ask for: prompts times n, best_of or beams; more get 400", minimum=1
    )
    prefill_backlog_s: float = setting(
        2.0, "work of prompts that may wait at a worker; other prompts wait in the gateway", unit="s", minimum=0
    )
