"""Steps: sequences, rows, the batch, and the interface between workers and engines. No torch, except for uploads."""
