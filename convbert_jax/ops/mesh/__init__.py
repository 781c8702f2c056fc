"""Ops on a mesh of devices: `division` partitions arrays, `sums` reduces over devices."""
