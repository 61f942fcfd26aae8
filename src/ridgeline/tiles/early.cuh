// Programmatic dependent launch (`boundary.early`): a kernel takes its place while the one before it in the stream still runs.
// Macro: PDL 1 (sm_90 and later) where a launcher starts two kernels so; the first says when the second may come, and the second waits for the
// first one's end, whose writes it then sees. The first was not early itself, or has waited: so before it waits, the second may read what was
// there before the first began, as a launcher's inputs are. It may not write. Without PDL neither compiles to anything.
#pragma once

#ifndef PDL
#define PDL 0
#endif
#if PDL && __CUDA_ARCH__ < 900
#error "PDL is for sm_90 and later"
#endif

// In the first kernel: once all its blocks have come here, or have ended, the second's take the places that are free.
__device__ inline void let_next_come() {
#if PDL
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// In the second: every thread that reads what the first wrote, or writes, comes here before. Again is free.
__device__ inline void wait_for_before() {
#if PDL
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
