"""Beam search: which tokens continue which beams, the sequences that compute them, and the blocks that those share."""
