"""What a client asks for, whichever API it speaks: one vocabulary between the bodies of the APIs and sampling parameters."""

from __future__ import annotations

import msgspec

from kvrelay.common.retention import Retention
from kvrelay.common.sampling import BeamSearch, Guide


class GenerationSpec(msgspec.Struct, frozen=True, kw_only=True):  # one per request: a tenth of a dataclass's cost
    """Ranges of single fields are checked by whoever parsed them; what depends on the model or on other fields is not yet."""

    max_tokens: int | None = None  # None: as many as fit
    max_tokens_param: str = "max_tokens"  # what the client calls it
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # None: the gateway draws one
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # beside the model's own end tokens
    ignore_eos: bool = False
    includes_stop: bool = False
    keeps_special: bool = False
    kept_tokens: tuple[str, ...] = ()  # special tokens that stay in the text
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    num_choices: int = 1  # returned …
    best_of: int = 1  # … of so many
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    guide: Guide | None = None
    guide_param: str | None = None  # the client's field that it was made from, where that is one
    has_watermark: bool = False
    processors: tuple[str, ...] = ()
    beam_search: BeamSearch | None = None
    priority: int = 0
    retention: Retention | None = None  # how long the KV should stay cached
    cache_salt: str = ""  # only requests with the same one share cached KV
    truncate: int | None = None  # only so many of the prompt's last tokens are used
