"""Generation: requests, the paged key-value cache, sampling, speculative decoding, and text from tokens."""
