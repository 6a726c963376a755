"""An engine without a model, for tests of everything around an engine, and for load."""
