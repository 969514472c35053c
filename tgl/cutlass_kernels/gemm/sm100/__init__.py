"""tcgen05 kernels for sm_100a."""
