"""Noise recovery: strip the noise of a predictable generator from an update."""
