"""Text to tokens and back: tokenizer, detokenizer, stop strings, and what a request asks of its tokens."""
