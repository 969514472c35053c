"""torch grouped linear: the expert layers of Mixture-of-Experts models as ``torch.library`` ops."""

__version__ = "0.1.0"
