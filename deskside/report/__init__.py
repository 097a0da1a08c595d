"""Reports of runs and studies as Markdown, HTML and PNG plots, made only from their directories."""
