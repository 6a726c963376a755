"""The frame of every run: sections in separate processes, rows of figures, sizes, floors, timing."""
