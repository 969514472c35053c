"""Loads a kernel repository with the library ``kernels``, as its users do, and runs an op of it.

PYTHON tests/packaging/hub_user.py DIRECTORY
"""

import sys
from pathlib import Path

import torch
from kernels import get_local_kernel
from kernels._rust import Digest, DigestAlgorithm, Metadata


def main(repository: Path) -> None:
    for variant in sorted((repository / "build").iterdir()):
        metadata = Metadata.read_from_file(variant / "metadata.json")
        assert metadata.name.python_name == metadata.id == "tgl"
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    tgl = get_local_kernel(repository, backend="cpu")
    assert Path(tgl.__file__) == repository / "build" / "torch-cpu" / "__init__.py"
    y = tgl.grouped_gemm(torch.ones(6, 4), torch.ones(2, 4, 8), torch.tensor([3, 6], dtype=torch.int32))
    assert y.tolist() == [[4.0] * 8] * 6
    print(f"kernels loaded tgl {tgl.__version__} from {tgl.__file__}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
