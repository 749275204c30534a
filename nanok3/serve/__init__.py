"""How K3 runs: sampling and generation."""
