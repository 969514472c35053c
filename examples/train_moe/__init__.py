"""Train a small byte-level Mixture-of-Experts transformer on the sources of the Python standard library."""
