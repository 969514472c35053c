"""A layer whose experts are spread over the ranks of a group: each rank brings its own tokens.

torchrun --nproc-per-node 2 -m examples.expert_parallel
"""

import torch
import torch.distributed as dist

import tgl

TOKENS = 32  # of each rank, at most


def main(steps: int = 5) -> list[float]:
    """Train the layer, and return the mean loss of all ranks in every step."""
    device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group()
    torch.manual_seed(0)  # router and shared expert are replicated: all ranks begin with equal weights
    layer = tgl.MoELayer(
        hidden_size=64,
        intermediate_size=96,
        num_experts=8,
        top_k=2,
        process_group=dist.group.WORLD,
        max_tokens=TOKENS,
        device=device,
    )
    torch.manual_seed(1 + dist.get_rank())
    x, target = torch.randn(2, TOKENS, 64, device=device)
    optimizer, losses = torch.optim.AdamW(layer.parameters(), lr=1e-2), []
    for step in range(steps):
        loss = (layer(x) - target).square().mean() / dist.get_world_size()
        optimizer.zero_grad()
        loss.backward()
        for parameter in layer.router.parameters():  # an expert's gradient has the tokens of all ranks already
            dist.all_reduce(parameter.grad)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {losses[-1]:.3f}")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
