"""The API of Anthropic's messages."""
