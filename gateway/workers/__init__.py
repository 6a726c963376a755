"""The workers: links to them, what they reported, who may be used together."""
