"""From logits to a token: masks, penalties, the draw."""
