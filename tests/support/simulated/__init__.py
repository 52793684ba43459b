"""A simulated GPU: enough of CuPy on the host's memory to run minigrad, as strict as CuPy is, and never faster."""
