"""A KV block in flight: its frame, its seal, the job that ships it."""
