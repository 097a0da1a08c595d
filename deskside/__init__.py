"""deskside: plan, train and align language models on the GPU you own."""

__version__ = "0.1.0"
