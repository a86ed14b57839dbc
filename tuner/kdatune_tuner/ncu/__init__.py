"""Hardware counters: run Nsight Compute on the kernels, read its report, say what the numbers mean."""
