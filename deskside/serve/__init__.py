"""Serve a model over HTTP with the OpenAI API, and chat with it in the terminal."""
