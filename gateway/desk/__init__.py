"""What operators look at: the requests of a gateway and its current state."""
