"""How a transformers model is cut among ranks: the plan for its type, what a rank keeps, and which layers the check takes."""
