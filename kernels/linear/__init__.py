"""Products with stored and rounded weights, with the weights of experts, and with adapters."""
