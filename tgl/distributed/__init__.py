"""Multi-rank support: DTensor sharding rules for the ops, registered on import, and expert parallelism.

Users and ``tgl.integrations`` import the names of ``__all__``; ``import tgl`` does not import this package. It builds
on ``tgl.nn``, the ops and ``tgl.meta.symmetric_memory``.
"""

from .expert_parallel import expert_parallel_host
from .expert_parallel_mlp import ExpertParallelMLP
from .sharding import register_sharding_rules

register_sharding_rules()

__all__ = ["ExpertParallelMLP", "expert_parallel_host", "register_sharding_rules"]
