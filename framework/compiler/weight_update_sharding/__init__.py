"""Automatic cross-replica sharding of the weight update (Xu et al. 2020)."""
