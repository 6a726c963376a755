"""Keys and authentication: who may connect to whom."""
