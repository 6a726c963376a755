"""Text to tokens and back: tokenizer, detokenizer, stop strings, sampling parameters."""
