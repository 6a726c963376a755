"""Operations on a CPU: torch, and our own kernels in C++."""
