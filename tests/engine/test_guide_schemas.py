"""Documents of random schemas meet them, written by random logits with the demo model's tokenizer."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvrelay.common.sampling import GuideKind
from kvrelay.engine.guidance import GuideRefusal
from kvrelay.engine.guide_compiler import GrammarCompiler

from .guided import RandomModel, compiled
from .schemas import any_schemas, followable_schemas

pytestmark = pytest.mark.timeout(900)


def document(compiler: GrammarCompiler, vocabulary: list[bytes], schema: Any, seed: int) -> Any:
    """What random logits make of the schema; a refusal if it is refused. Fails if the text is no JSON, or has no end."""
    state = compiled(compiler, GuideKind.JSON_SCHEMA, json.dumps(schema))
    if isinstance(state, GuideRefusal):
        return state
    model = RandomModel(vocabulary, seed)
    output, is_over = model.generate(state)
    assert is_over, f"no end: {model.text(output)[:500]}"
    return json.loads(model.text(output))


@given(schema=followable_schemas(), seed=st.integers(0, 2**32))
def test_every_document_of_a_followable_schema_meets_it(
    guide_compiler: GrammarCompiler, vocabulary: list[bytes], schema: Any, seed: int
) -> None:
    found = document(guide_compiler, vocabulary, schema, seed)
    assert not isinstance(found, GuideRefusal), f"{found.detail}: {json.dumps(schema)}"
    jsonschema.Draft202012Validator(schema).validate(found)


@given(schema=any_schemas(), seed=st.integers(0, 2**32))
@example(schema={"type": "object", "required": ["a"]}, seed=0)
@example(schema={"type": "string", "maxLength": 3}, seed=0)
def test_a_schema_is_refused_or_followed_to_the_letter(
    guide_compiler: GrammarCompiler, vocabulary: list[bytes], schema: Any, seed: int
) -> None:
    found = document(guide_compiler, vocabulary, schema, seed)
    if not isinstance(found, GuideRefusal):
        jsonschema.Draft202012Validator(schema).validate(found)
