"""Device functions for kernels: no grid, no launch, no torch."""
