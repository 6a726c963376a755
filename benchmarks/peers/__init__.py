"""The peers of the benchmarks: starts each one, puts the same load on it, and compares.

A *side* is anything that is measured: a deployment of kvrelay, another server, or an engine without a server. All sides of a
comparison are loaded at once and take turns. The others are stopped with SIGSTOP meanwhile and use no CPU. Users measure a single
server with ``kvrelay bench`` instead.
"""
