"""``python -m kvrelay.launcher``: the ``kvrelay`` command without its script."""

from kvrelay.launcher.cli import main

if __name__ == "__main__":
    main()
