"""A kernel of your own for an op of tgl: registered, explained, and checked against the op's own implementations.

python -m examples.custom_kernel
"""

import torch
from torch import Tensor

import tgl


def supports(dy: Tensor, offs: Tensor, *, out: Tensor) -> str | None:
    """Return why the kernel cannot serve a call, or None; ``tgl.explain`` prints it."""
    if dy.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"takes bfloat16, float16 and float32, got {dy.dtype}"
    return None


def dbias(dy: Tensor, offs: Tensor, *, out: Tensor) -> None:
    """Write the sum over the rows of every group; rows past the last group are not read."""
    group = torch.searchsorted(offs, torch.arange(dy.shape[0], dtype=offs.dtype, device=dy.device), right=True)
    rows = torch.where(group[:, None] < offs.shape[0], dy, 0).float()
    out.zero_().index_add_(0, group.clamp(max=offs.shape[0] - 1), rows)  # your kernel's launch


def main() -> None:
    layer = tgl.GroupedLinear(4, 32, 48, bias=True)
    x, m_splits = torch.randn(100, 32), torch.tensor([30, 0, 50, 10])
    layer(x, m_splits).square().sum().backward()
    expected = layer.bias.grad

    kernel = tgl.register_implementation("grouped_dbias", "mine", device="cpu", supports=supports)(dbias)
    try:
        dy, offs = torch.randn(100, 48), tgl.splits_to_offsets(m_splits)
        print(tgl.explain(tgl.grouped_dbias, dy, offs))
        layer.bias.grad = None
        layer(x, m_splits).square().sum().backward()  # the backward of the layer runs it now
        torch.testing.assert_close(layer.bias.grad, expected)
    finally:
        tgl.backends.remove(kernel)


if __name__ == "__main__":
    main()
