"""How K3 learns: losses, optimizer, balancing, schedule, loop, checkpoints, report."""
