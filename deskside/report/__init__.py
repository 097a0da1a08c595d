"""Reports of runs: Markdown, HTML and PNG plots, from the run directory alone."""
