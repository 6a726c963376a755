"""What is wrong with a guide::

UnsupportedGuideError   the text is not what its kind says, or nobody can follow it
"""

from __future__ import annotations


class UnsupportedGuideError(Exception):
    """The message is for the client: it names what is wrong with the guide."""
