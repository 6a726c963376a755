"""An engine without a model, for tests of all that is around it, and for load."""
