"""``kvrelay bench``: load for any OpenAI-compatible server, and what came of it.

Data flows one way: ``workload`` plans every request before the first is sent, ``client`` sends one and notes when each chunk came,
``load`` sends them all at their times, and the :class:`~kvrelay.launcher.bench.records.RunResult` that comes out is all that
``summary``, ``report`` and ``compare`` ever see.
"""
