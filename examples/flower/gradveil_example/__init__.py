"""A Flower app whose clients share defended updates."""
