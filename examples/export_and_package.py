"""Export a layer with a dynamic number of tokens, and package it with AOTInductor.

python -m examples.export_and_package
"""

import tempfile
from pathlib import Path

import torch
from torch.export import Dim

import tgl


def main(package: bool = True) -> None:
    torch.manual_seed(0)
    layer = tgl.MoELayer(hidden_size=64, intermediate_size=96, num_experts=8, top_k=2).eval()
    x, more = torch.randn(16, 64), torch.randn(50, 64)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        program = torch.export.export(layer, (x,), dynamic_shapes=({0: Dim("tokens", min=2)},))
        torch.export.save(program, Path(folder) / "layer.pt2")
        loaded = torch.export.load(Path(folder) / "layer.pt2").module()
        torch.testing.assert_close(loaded(more), layer(more))
        print("exported, saved, loaded: same results for another number of tokens")
        if package:  # compiles C++ for half a minute
            path = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(folder) / "package.pt2"))
            compiled = torch._inductor.aoti_load_package(path)
            torch.testing.assert_close(compiled(more), layer(more))
            print("packaged and loaded: same results")


if __name__ == "__main__":
    main()
