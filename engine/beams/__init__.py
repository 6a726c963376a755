"""Beam search: the choice of beams, the sequences that compute them, and the blocks that those share."""
