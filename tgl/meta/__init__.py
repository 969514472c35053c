"""Argument checks and output specs of the ops, as pure functions of metadata.

Both the fake and the real implementation of every op call the same function from here, so they cannot drift apart.
Nothing in this package reads a tensor's values, and nothing branches on a symbolic size. Every package may import it;
it imports only torch.
"""
