"""Keys of the control links, and who may speak."""
