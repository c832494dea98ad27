"""The version, which every audit and report states."""

__version__ = "0.1.0"
