"""What `speculation.py` is made of: a drafting head that has memorised texts. Tests use it too."""
