"""StableHLO modules: read, completed by propagation, tidied."""
