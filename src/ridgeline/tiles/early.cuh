// Programmatic dependent launch (`boundary.early`): a kernel starts while the one before it in the stream still runs.
// Macro: PDL 1 (sm_90 and later) if a launcher starts kernels so. Each kernel says when the next may start, and waits
// for the end of the previous one, whose writes it then sees.
// Before the wait a kernel may read only what existed before the call's first kernel, such as the launcher's inputs, or
// what the previous kernel wrote to L2 before its trigger (stores, `__threadfence`, `__syncthreads`, `let_next_come`;
// read with `__ldcg`). PTX guarantees only what a wait makes visible; this is safe because the writes precede the
// trigger and both kernels access L2.
// Before the wait a kernel must not write: the next may start before this one has waited, so even the kernel two back
// may still run. Some thread of each kernel must wait, since the next one waits for its end. Without PDL both functions
// compile to nothing.
#pragma once

#ifndef PDL
#define PDL 0
#endif
#if PDL && __CUDA_ARCH__ < 900
#error "PDL is for sm_90 and later"
#endif

// In the first kernel: once all its blocks have called this or ended, the second kernel's blocks take free places.
__device__ inline void let_next_come() {
#if PDL
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// In the second kernel: every thread that reads what the first wrote, or writes, calls this first. Repeating it is
// free.
__device__ inline void wait_for_before() {
#if PDL
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
