"""Studies: train a matrix of configurations on this machine with several seeds, and compare them statistically."""
