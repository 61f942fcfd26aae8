"""What a CUDA graph makes of a function, and what keeps a function from becoming one."""
