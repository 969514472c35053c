"""Helpers of every room: a hash of the sources, the package's part in keys of compiled graphs, hooks on imports."""
