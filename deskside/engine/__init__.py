"""Generation: sampling, the key-value cached loop, and text from tokens."""
