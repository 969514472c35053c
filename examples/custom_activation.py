"""An activation that tgl does not have, between two grouped linear layers, eager and compiled.

python -m examples.custom_activation
"""

import torch
from torch import Tensor, nn

import tgl


class Experts(nn.Module):
    """Experts with ``silu(gate) tanh(up)``: elementwise expressions, which the compiler fuses."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.fc1 = tgl.GroupedLinear(num_experts, hidden_size, 2 * intermediate_size)
        self.fc2 = tgl.GroupedLinear(num_experts, intermediate_size, hidden_size)

    def forward(self, x: Tensor, top_k_index: Tensor, weights: Tensor) -> Tensor:
        routing = tgl.route(top_k_index, self.fc1.num_gemms)
        gate, up = self.fc1.forward_offsets(tgl.dispatch(x, routing), routing.offs).chunk(2, -1)
        hidden = nn.functional.silu(gate) * up.tanh()
        rows = self.fc2.forward_offsets(hidden, routing.offs)
        return tgl.combine(rows * tgl.dispatch_weights(weights, routing)[:, None], routing)


def main(backend: str = "inductor") -> None:
    torch.manual_seed(0)
    experts = Experts(8, 64, 96)
    x, index, weights = torch.randn(100, 64), torch.randint(8, (100, 2)), torch.rand(100, 2)
    y = experts(x, index, weights)
    y.square().mean().backward()
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend=backend)
    torch.testing.assert_close(compiled(x, index, weights), y)
    print(f"trained; compiled by {backend}: same results")


if __name__ == "__main__":
    main()
