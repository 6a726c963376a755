"""What `handoff.py` is made of: pools, ways for blocks, rounds, and the processes on both sides. `gpu.py` uses it too."""
