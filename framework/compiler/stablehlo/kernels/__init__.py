"""Fused kernels of devices, as JAX lowers them, in programs of TF."""
