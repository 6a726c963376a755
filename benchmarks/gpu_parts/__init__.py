"""What :mod:`gpu` runs: a module for each group of figures, and the few that all of them share.

``sizes`` says how large everything is, ``floors`` how fast it could be at best, ``rows`` what a figure looks like, ``timing`` how
something is timed, ``running`` runs sections in processes of their own. The others are sections and what they need.
"""
