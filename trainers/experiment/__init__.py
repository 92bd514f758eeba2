"""An experiment: its configuration, and the programs compiled from it."""
