"""Grammars that an output must follow: compiled in a process of their own, asked for every token."""
