"""Grammars that an output must follow. A separate process compiles them; each token's mask comes from them."""
