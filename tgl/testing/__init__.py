"""Tools for testing ops and kernels: sample inputs, opcheck runs, and the kernel emulator."""
