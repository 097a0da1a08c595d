"""The processes of the sandbox. They run without site-packages, so these modules import only the standard library."""
