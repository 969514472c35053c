"""Every op keeps every contract, on every sample: opcheck and the checks of ``tgl.testing``."""

import pytest
import torch

import tgl.testing

NAMES = sorted(tgl.testing.SIGNATURES)
ON_THEIR_OWN = {  # and where they are under test
    "allocate_wgrad",  # below
    "grouped_activation_quantize",  # test_activation_quantize.py: the bytes of two ops that are here
    "scale_from_layout",  # quantize/test_scale_layout.py
    "scale_to_layout",
    "wgrad_stash_",  # test_wgrad_stash.py
}
