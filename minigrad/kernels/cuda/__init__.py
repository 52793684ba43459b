"""How kernels are launched on a GPU, one file an operation or kind; the ``.cu`` files are one folder up."""
