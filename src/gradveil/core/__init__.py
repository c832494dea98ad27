"""The foundations that every other package builds on."""
