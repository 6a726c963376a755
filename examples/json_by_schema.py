"""An answer that fits a JSON schema: tokens that violate it are never sampled."""

import json
import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("KVRELAY_URL", "http://127.0.0.1:8000") + "/v1", api_key="none")
model = client.models.list().data[0].id

schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "country": {"enum": ["France", "Germany", "Italy"]},
        "inhabitants": {"type": "integer", "minimum": 0, "maximum": 100_000_000},
    },
    "required": ["name", "country", "inhabitants"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Describe the city of Paris as JSON."}],
    response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
    temperature=0,
    max_tokens=200,
)
city = json.loads(answer.choices[0].message.content or "")
print(f"{city['name']} lies in {city['country']} and has {city['inhabitants']} inhabitants.")
