"""The parts of :mod:`gpu`: a module for each group of figures, and modules that they share.

``sizes`` has all sizes, ``floors`` the best possible times, ``rows`` the form of a figure, ``timing`` the stopwatch, and
``running`` the processes of sections. The other modules are sections and their helpers.
"""
