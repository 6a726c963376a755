"""``python -m kvrelay.launcher``: runs the ``kvrelay`` command without its script."""

from kvrelay.launcher.cli import main

if __name__ == "__main__":
    main()
