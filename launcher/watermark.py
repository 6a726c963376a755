"""``kvrelay watermark``: whether a text carries the watermark that requests can ask for (:mod:`kvrelay.common.watermark`)."""

from __future__ import annotations

from kvrelay.common.watermark import detect
from kvrelay.gateway.text.tokenizer import Tokenizer
from kvrelay.launcher.models import resolve_model


def report(text: str, model: str, gamma: float) -> list[str]:
    """The lines to print about ``text``, as ``model``'s tokenizer splits it. Raises KvrelayError if there is no such model.

    A client's text may be split otherwise than it was generated, at its ends above all; that costs a few green tokens.
    """
    tokenizer = Tokenizer.load(resolve_model(model, needs_weights=False))
    found = detect(tokenizer.encode(text, add_special_tokens=False), gamma)
    return [
        f"scored tokens   {found.num_scored}",
        f"green fraction  {found.green_fraction:.3f} (by chance {gamma:g})",
        f"z               {found.z:.2f}",
        f"p-value         {found.p_value:.3g}",
    ]
