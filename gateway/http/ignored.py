"""Fields of bodies that nobody knows: the client is told in a header, the operator in the log, once for each name."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

logger = logging.getLogger(__name__)

HEADER = "x-ignored-fields"

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # what is any other stands in no header and no log
_MAX_SHOWN = 16  # names in a header
_MAX_LOGGED = 256  # names that are remembered

# What OpenAI's clients send for OpenAI's own books: it would change no answer.
BOOKKEEPING = frozenset(
    {"user", "store", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)


class IgnoredFields:
    """One gateway's."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def headers(self, names: Sequence[str]) -> dict[str, str]:
        """What an answer says of the names that its body had for nothing; logs those that are new."""
        if not names:
            return {}
        plain = [name for name in names if _PLAIN_NAME.fullmatch(name)]
        shown = plain[:_MAX_SHOWN]
        for name in shown:
            if name not in self._logged and len(self._logged) < _MAX_LOGGED:
                self._logged.add(name)
                logger.warning("requests have a field %r, which means nothing here; it is ignored", name)
        num_more = len(names) - len(shown)
        return {HEADER: ", ".join([*shown, f"and {num_more} more"] if num_more else shown)}
