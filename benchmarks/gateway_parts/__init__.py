"""What `gateway.py` is made of: a paced worker and its link, loads, and what they cost. `gpu.py` uses the link too."""
