"""Errors of guides::

UnsupportedGuideError   the text does not fit its kind, or cannot be followed
"""

from __future__ import annotations


class UnsupportedGuideError(Exception):
    """The message is for the client and says what is wrong with the guide."""
