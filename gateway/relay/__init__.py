"""One request on its way through workers: attempts, failover, shared prompts. Knows tokens only."""
