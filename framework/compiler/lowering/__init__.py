"""From a TF function to an HLO module."""
