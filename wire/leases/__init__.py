"""A decode worker's leases on KV blocks: their states, and how received blocks are written and verified."""
