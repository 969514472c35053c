"""Helpers for all packages: a hash of the sources, this package's part of compile cache keys, import hooks."""
