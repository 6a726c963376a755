"""Operations on a GPU: Triton kernels, CUDA graphs, memory."""
