"""Studies: a matrix of configurations, run fairly on this machine, compared with intervals."""
