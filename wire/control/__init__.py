"""Control messages between gateways and workers: client, server, heartbeats."""
