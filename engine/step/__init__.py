"""What a step is: sequences, rows, the batch, and the interface between workers and engines. No torch but for uploads."""
