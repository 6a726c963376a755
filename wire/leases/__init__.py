"""What a decode worker grants and proves: leases, their states, the landing of blocks."""
