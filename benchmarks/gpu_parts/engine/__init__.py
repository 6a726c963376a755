"""Times of the whole engine, and of workers."""
