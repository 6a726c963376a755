"""Which tokens come next, as far as roles share it: places, blocks, what steps cost. Model thread only; no sockets."""
