"""Products with stored and rounded weights, with experts' and with adapters'."""
