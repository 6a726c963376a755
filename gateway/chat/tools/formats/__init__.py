"""How models write calls. A new format is a module here with a generator over a ``reader``, and a family in ``families``."""
