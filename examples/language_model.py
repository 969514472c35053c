"""A byte-level language model whose feed-forward layers are ``tgl.MoELayer``, trained on this file.

python -m examples.language_model
"""

from pathlib import Path

import torch
from torch import Tensor, nn

import tgl

WIDTH, CONTEXT = 64, 64


class Block(nn.Module):
    """Causal attention and a layer of 8 experts, of which each byte uses 2."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = tgl.MoELayer(hidden_size=WIDTH, intermediate_size=96, num_experts=8, top_k=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        y, router = self.experts(self.norms[1](x), return_router=True)
        return x + y, self.experts.router_loss(router)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Return the loss of predicting each byte of ``text [B, CONTEXT + 1]``, and the losses of the routers."""
        x, routers = self.bytes(text[:, :-1]) + self.positions.weight, 0.0
        for block in self.blocks:
            x, loss = block(x)
            routers = routers + loss
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten()) + routers


def main(steps: int = 30) -> list[float]:
    """Train, and return the loss of every step."""
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    model, losses = Model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (16, 1))
        loss = model(text[starts + torch.arange(CONTEXT + 1)])  # torch.compile(model, fullgraph=True) works as well
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:3}: loss {loss.item():.3f}")
    return losses


if __name__ == "__main__":
    main()
