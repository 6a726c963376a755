"""``kvrelay bench``: sends load to any OpenAI-compatible server and reports what came of it.

Data flows one way. ``workload`` plans every request before the first is sent. ``client`` sends one request and notes when each
chunk arrives. ``load`` sends all of them at their times. The result is a :class:`~kvrelay.launcher.bench.records.RunResult`, the
only input of ``summary``, ``report`` and ``compare``.
"""
