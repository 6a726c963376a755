"""What the benchmarks measure kvrelay against: starts each peer, puts the same load on it, and compares.

A *side* is one thing that is measured: a deployment of kvrelay, another server, or an engine without a server. All sides of a
comparison are loaded at the same time and take turns; those whose turn it is not are stopped with SIGSTOP, so that they use
no CPU. Not for users: ``kvrelay bench`` measures one server, whoever started it.
"""
