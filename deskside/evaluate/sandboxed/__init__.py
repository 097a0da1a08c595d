"""Processes of the sandbox. These modules use the standard library alone: they run without site-packages."""
