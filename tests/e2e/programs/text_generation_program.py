"""A program as users of text-generation, TGI's own client, write it. Prints its results as JSON. Arguments: base URL,
model."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from text_generation import AsyncClient, Client
from text_generation.errors import ValidationError as Refused
from text_generation.types import Grammar, GrammarType

url, model = sys.argv[1:]
client = Client(url, timeout=120)
prompt = "The capital of France is"


async def both() -> dict[str, Any]:
    """Text from the asynchronous client, whole and streamed."""
    asynchronous = AsyncClient(url, timeout=120)
    answer = await asynchronous.generate(prompt, max_new_tokens=8)
    pieces = [event.token.text async for event in asynchronous.generate_stream(prompt, max_new_tokens=8)]
    return {"async": answer.generated_text, "async_streamed": "".join(pieces)}


whole = client.generate(prompt, max_new_tokens=8, decoder_input_details=True, top_n_tokens=2)
events = list(client.generate_stream(prompt, max_new_tokens=8))
best = client.generate(prompt, max_new_tokens=8, best_of=2, do_sample=True)
grammar = client.generate(
    "A number:", max_new_tokens=12, grammar=Grammar(type=GrammarType.Regex, value="[0-9]{3}-[0-9]{2}")
)
chat = client.chat(messages=[{"role": "user", "content": "Hello"}], max_tokens=6, temperature=0.0, stream=False)
try:
    # The client checks some parameters itself. Only the server can refuse this one.
    client.generate(prompt, max_new_tokens=1_000_000)
    refused = None
except Refused as error:
    refused = str(error)
print(
    json.dumps(
        {
            "whole": whole.generated_text,
            "finish_reason": whole.details.finish_reason,
            "tokens": [token.text for token in whole.details.tokens],
            "logprobs": [token.logprob for token in whole.details.tokens],
            "prefill": [token.text for token in whole.details.prefill],
            "num_top_tokens": [len(tokens) for tokens in whole.details.top_tokens],
            "streamed": "".join(event.token.text for event in events),
            "last": events[-1].generated_text,
            "best_of": len(best.details.best_of_sequences or []),
            "grammar": grammar.generated_text,
            "chat": chat.choices[0].message.content,
            "refused": refused,
            **asyncio.run(both()),
        }
    )
)
