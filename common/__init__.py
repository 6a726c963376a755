"""The vocabulary that every component shares: sampling parameters, model card, block hashes, settings, logs.

Nothing here knows a socket's peer, a tensor or an HTTP route. A thing belongs here only if two components that
may not import each other must agree on it.
"""
