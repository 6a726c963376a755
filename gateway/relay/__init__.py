"""One request on its way through workers: attempts, failover, shared prompts. This room knows tokens only, no text."""
