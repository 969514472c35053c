"""Bridges to other libraries; each is imported by name, and importing ``tgl`` imports none of them."""
