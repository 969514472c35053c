"""What a CPU computes: the exact implementations of the ops, as steps of aten."""
