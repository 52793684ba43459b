"""The machine underneath: threads, and the memory that the process keeps."""
