"""Errors every component shares.

    KvrelayError
    ├── SettingsError      a flag, variable or config file entry is wrong: name, value, limit
    └── ModelError         a model directory cannot be served: what is missing or broken, and the way out

Component families add their own trees below KvrelayError in their own ``errors.py``.
"""


class KvrelayError(Exception):
    """Base of all errors that kvrelay raises on purpose; its text is meant for the operator."""


class SettingsError(KvrelayError):
    """A setting has a bad value. The text names the setting, the value and the limit."""


class ModelError(KvrelayError):
    """A model directory cannot be served. The text names the file or field and the way out."""
