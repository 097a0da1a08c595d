"""Reports of runs and studies as Markdown, HTML and PNG plots, from their directories alone."""
