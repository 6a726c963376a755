"""Code that both roles of workers share: checks of requests, and the base of services and processes."""
