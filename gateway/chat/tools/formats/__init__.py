"""How models write calls: a new format is a module here, read by a generator over a ``reader``, and a family in ``families``."""
