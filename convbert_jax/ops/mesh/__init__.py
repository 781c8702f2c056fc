"""Ops on a mesh of devices: `division` says who has what, `sums` what is added up over them."""
