"""vLLM: run the experts of a served model on the grouped ops.

The package is a plugin of vLLM, which loads it by itself. The plugin changes no model until one is loaded with::

    LLM(model, quantization="tgl")       # or: vllm serve MODEL --quantization tgl

Nothing is quantised: a quantisation is the means by which vLLM lets a plugin choose the implementation of a layer. The
experts run by ``tgl.moe`` on vLLM's own parameters, and every other layer is vLLM's, unquantised.
"""

from __future__ import annotations

__all__ = ["NAME", "register"]

NAME = "tgl"


def register() -> None:
    """Make ``quantization="tgl"`` available to vLLM; vLLM calls this, in each of its processes.

    Raises:
        ImportError: vLLM is not installed, or is a version without the classes that the plugin needs.
    """
    from vllm.model_executor.layers.quantization import register_quantization_config

    from ._vllm_experts import ExpertsConfig

    register_quantization_config(NAME)(ExpertsConfig)
