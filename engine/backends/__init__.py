"""Operations of each device: everything that differs between a CPU and a GPU."""
