"""Faults, overload and attackers: no answer may be lost or wrong, and honest clients may not be disturbed.

Each script here is a long run, and a test beside it runs a short one. From the repository's root::

    PYTHONSAFEPATH=1 PYTHONPATH=. .venv/bin/python -m tests.reliability.fuzz_wire --help

A script prints one line per result and exits with 1 on a failure. ``make fuzz`` runs them all.
"""
