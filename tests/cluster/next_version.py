"""Runs while an image is built, and changes the installed kvrelay into a possible next version, for tests of upgrades.

It raises the version and the protocol number, and adds a field to every message.
"""

from __future__ import annotations

import re
from pathlib import Path

import kvrelay


def change(path: Path, pattern: str, new: str) -> None:
    """Replace the only match of ``pattern`` in ``path``."""
    text, count = re.subn(pattern, new, path.read_text(), flags=re.MULTILINE)
    assert count == 1, f"{pattern!r} is {count} times in {path}"
    path.write_text(text)


def main() -> None:
    """Change the files of the installed package."""
    package = Path(kvrelay.__file__).parent
    messages = package / "wire" / "messages.py"
    major, minor, _ = kvrelay.__version__.split(".", 2)
    change(package / "__init__.py", r'^__version__ = ".*"$', f'__version__ = "{major}.{int(minor) + 1}.0"')
    change(messages, r"^(PROTOCOL_MIN, PROTOCOL_MAX = \d+, \d+)", r"\1 + 1")
    new_field = "    of_the_next_version: list[int] = msgspec.field(default_factory=lambda: [1, 2])"
    change(messages, r"^class _Message\(.*\):\n    \"\"\".*\"\"\"$", rf"\g<0>\n\n{new_field}")


if __name__ == "__main__":
    main()
