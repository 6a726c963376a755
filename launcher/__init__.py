"""The ``kvrelay`` command: everything on one machine (``local``), one component alone, models, and the proof (``verify``).

The launcher is the only component that may import all others; it does so late, so that ``kvrelay --help`` is quick and
``kvrelay gateway`` runs where torch is not installed.
"""
