"""Faults, overload, attackers: what must not be lost, and who must not notice.

Each script here is a long run, and has a test beside it that runs a short one. From the repository's root::

    PYTHONSAFEPATH=1 PYTHONPATH=. .venv/bin/python -m tests.reliability.fuzz_wire --help

A script prints one line per result and leaves with 1 on a failure. ``make fuzz`` runs them all.
"""
