// A kernel that does nothing: what the driver is asked about clusters with.
extern "C" __global__ void empty() {}
