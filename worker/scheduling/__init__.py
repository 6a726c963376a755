"""The scheduling that both roles share: places, blocks, and the cost of steps. Model thread only; no sockets."""
