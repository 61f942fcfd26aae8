// Programmatic dependent launch (`boundary.early`): a kernel takes its place while the one before it in the stream still runs.
// Macro: PDL 1 (sm_90 and later) where a launcher starts kernels so; each says when the next may come, and waits for the end of the one before,
// whose writes it then sees. Before it waits a kernel may read only what was there before the call's first kernel, as the launcher's inputs
// are, or what that kernel wrote to L2 before it let this one come (stores, `__threadfence`, `__syncthreads`, `let_next_come`; here `__ldcg`.
// PTX promises what a wait shows and no more; this is in order since the one has happened when the other begins, and L2 is where both look).
// And it may not write: the next may come before this one has waited, so even two kernels back may still run. Some thread of each must wait,
// since the next one's wait is for this one's end. Without PDL neither compiles to anything.
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
