"""HTTP APIs: what each one takes, refuses and answers. All of them make generations of requests in one way."""
