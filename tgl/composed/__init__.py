"""Implementations of ops that are made of other ops, each step by whatever serves its op on the device."""
