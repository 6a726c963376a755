"""What workers say to TGI's clients, and what those should get of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx

from kvrelay.common.sampling import FinishReason, SampledToken
from kvrelay.gateway.tokenizer import Tokenizer
from kvrelay.wire.messages import Submit, TokenDelta, Tokens

from .http_app import tokens_of
from .players import Player, Script


def sampled(tokenizer: Tokenizer, text: str, *, has_eos: bool) -> list[SampledToken]:
    """The tokens of ``text``, and the end of it."""
    tokens = list(tokens_of(tokenizer, text))
    return (
        [*tokens, SampledToken(tokenizer.eos_ids[0], -0.25, ((tokenizer.eos_ids[0], -0.25), (5, -3.0)))]
        if has_eos
        else tokens
    )


def saying_to_the_end(
    texts: str | Sequence[str],
    *,
    per_message: int = 1,
    end: FinishReason = FinishReason.STOP,
) -> Script:
    """Generates a text and its end token, the n-th choice the n-th text; with the prompt's log probabilities if asked for."""

    def script(player: Player, submit: Submit) -> None:
        said = texts if isinstance(texts, str) else texts[submit.sampling.choice]
        tokens = sampled(player.tokenizer, said, has_eos=end is FinishReason.STOP)
        for index in range(0, len(tokens), per_message):
            known = None
            if index == 0 and submit.sampling.num_prompt_logprobs is not None:
                known = [SampledToken(token_id, -1.5) for token_id in submit.token_ids[1 : submit.num_prompt_tokens]]
            is_last = index + per_message >= len(tokens)
            item = TokenDelta(
                request_id=submit.request_id,
                attempt=submit.attempt,
                index=index,
                tokens=tokens[index : index + per_message],
                finish_reason=end if is_last else None,
                prompt_logprobs=known,
            )
            player.say(Tokens(items=[item]))

    return script


def events_of(response: httpx.Response) -> list[Any]:
    """A stream's events: all of them are JSON, also the last one."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    return [json.loads(line.removeprefix("data: ")) for line in lines]
