"""The ``kvrelay`` command: a local deployment, single components, models, and tools such as ``verify`` and ``bench``.

Only the launcher may import all other components. It imports them late, so ``kvrelay --help`` is fast, and a gateway needs no
torch.
"""
