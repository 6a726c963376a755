"""The gateway: the HTTP API, tokenization, routing, and the relay of a request through the workers. Never imports torch."""
