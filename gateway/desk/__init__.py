"""What operators look at: what became of requests, and what a gateway does just now."""
