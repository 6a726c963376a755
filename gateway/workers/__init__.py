"""The workers: links to them, their reports, and which of them fit together."""
