"""Everything that differs between a CPU and a GPU: the operations of each device."""
