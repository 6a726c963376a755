"""What is computed of each row by itself: norms, activations."""
