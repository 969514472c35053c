"""What an op accepts and what it returns, as pure functions of metadata: argument checks and output specs.

Both the fake and the real implementation of every op call the same function from here, so they cannot drift apart.
Nothing in this package reads a tensor's values, and nothing branches on a symbolic size. Every package may import it;
it imports torch alone.
"""
