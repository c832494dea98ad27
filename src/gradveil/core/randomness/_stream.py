"""A cryptographic stream of random bits, keyed by the operating system."""

import hashlib
import os
import threading
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

KEY_BYTES = 32
_BLOCK = 16  # bytes of an AES block
_ZEROS = bytes(1 << 19)


class Keystream:
    """AES-256 in counter mode (NIST SP 800-38A): unlimited unpredictable bits, at gigabytes per second.

    Args:
        key: 32 secret bytes.
        counter: the first counter block.

    Example:
        >>> Keystream(bytes(32)).words(2).tolist()
        [2025887196, 2307473570]
    """

    def __init__(self, key: bytes, counter: bytes = bytes(_BLOCK)) -> None:
        self._encryptor = Cipher(algorithms.AES256(key), modes.CTR(counter)).encryptor()

    def fill(self, array: NDArray[Any]) -> None:
        """Overwrite a contiguous array with random bits."""
        target = memoryview(array.view(np.uint8)).cast("B")  # type: ignore[arg-type]  # numpy 2.4 has no __buffer__
        for first in range(0, len(target), len(_ZEROS)):
            part = target[first : first + len(_ZEROS)]
            # Encrypting zeros gives the stream itself.
            self._encryptor.update_into(memoryview(_ZEROS)[: len(part)], part)

    def words(self, count: int) -> NDArray[np.uint32]:
        """`count` random 32-bit words."""
        result = np.empty(count, "<u4")
        self.fill(result)
        return result

    def doubles(self, count: int) -> NDArray[np.float64]:
        """`count` uniform values in [0, 1), multiples of 2^-53."""
        bits = np.empty(count, "<u8")
        self.fill(bits)
        bits >>= np.uint64(11)
        return bits * 2.0**-53


class SecretKey:
    """A secret from the operating system, from which each draw gets a stream of its own.

    A draw's key is BLAKE2b of its number under the secret. Layers, clients and rounds are therefore independent, and
    whoever learns one stream knows nothing of the others. A forked process takes a new secret, and so does a copy:
    otherwise they would repeat the draws.

    Example:
        >>> key = SecretKey()
        >>> bool((key.stream().words(4) == key.stream().words(4)).all())
        False
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._renew()

    def __reduce__(self) -> tuple[type["SecretKey"], tuple[()]]:
        return SecretKey, ()

    def _renew(self) -> None:
        self._secret, self._fork_count, self._draw_count = os.urandom(KEY_BYTES), _fork_count, 0

    def stream(self) -> Keystream:
        """The stream of the next draw."""
        with self._lock:
            if self._fork_count != _fork_count:
                self._renew()
            self._draw_count += 1
            secret, number = self._secret, self._draw_count.to_bytes(8, "little")
        return Keystream(hashlib.blake2b(number, key=secret, digest_size=KEY_BYTES).digest())


_fork_count = 0  # forks between the first process and this one; process ids would not do, because they are reused


def _increment_fork_count() -> None:
    global _fork_count
    _fork_count += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_increment_fork_count)
