"""Short digests, by which files and settings are recognised."""

import hashlib

DIGITS = 16


def bytes_digest(content: bytes) -> str:
    """The first digits of the SHA-256 of some bytes.

    >>> bytes_digest(b"")
    'e3b0c44298fc1c14'
    """
    return hashlib.sha256(content).hexdigest()[:DIGITS]
