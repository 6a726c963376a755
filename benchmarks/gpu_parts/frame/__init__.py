"""What every run has: sections in processes of their own, rows of figures, sizes, floors, timing."""
