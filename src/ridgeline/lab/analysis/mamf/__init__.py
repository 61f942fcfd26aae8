"""The largest reachable rate of matrix products over many shapes, and why some shapes are slower."""
