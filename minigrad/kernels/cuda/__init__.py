"""How kernels are launched on a GPU, one file an operation or kind; their sources stand beside the definitions."""
