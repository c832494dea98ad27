import copy
import os
import pickle

import numpy as np
import torch

from gradveil.core.randomness import SecureSource
from gradveil.core.randomness._stream import Keystream, SecretKey

# NIST SP 800-38A, F.5.5: CTR-AES256.Encrypt.
KEY = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
COUNTER = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
PLAIN = bytes.fromhex(
    "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
    "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
)
CIPHER = bytes.fromhex(
    "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"
    "2b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6"
)


def test_the_stream_is_aes_in_counter_mode():
    words = Keystream(KEY, COUNTER).words(16)
    assert bytes(a ^ b for a, b in zip(words.tobytes(), PLAIN, strict=True)) == CIPHER


def test_a_stream_is_the_same_however_it_is_read():
    together = Keystream(KEY).words(300_000)  # more than one chunk of encryption
    stream = Keystream(KEY)
    apart = np.concatenate([stream.words(100_000) for _ in range(3)])
    assert np.array_equal(together, apart)


def test_words_pass_frequency_and_run_tests():
    """The first tests of NIST SP 800-22 on 2^24 bits, each at a significance level of 1e-6."""
    bits = np.unpackbits(SecretKey().stream().words(1 << 19).view(np.uint8)).astype(np.int64)
    count = len(bits)
    assert abs((2 * bits - 1).sum()) < 4.9 * count**0.5  # frequency
    blocks = bits.reshape(-1, 128).sum(1)  # frequency in blocks: chi-square with one degree of freedom per block
    chi = (4 * (blocks - 64) ** 2 / 128).sum()
    assert abs(chi - len(blocks)) < 4.9 * (2 * len(blocks)) ** 0.5
    runs = 1 + (bits[1:] != bits[:-1]).sum()
    assert abs(runs - count / 2) < 4.9 * count**0.5 / 2
    for lag in (8, 32, 512):
        agree = (bits[lag:] == bits[:-lag]).sum()
        assert abs(agree - (count - lag) / 2) < 4.9 * count**0.5 / 2


def test_copies_do_not_repeat_the_draws():
    source = SecureSource()
    for again in (copy.deepcopy(source), pickle.loads(pickle.dumps(source))):
        own, other = (one.uniform(torch.empty(8, dtype=torch.float64)) for one in (source, again))
        assert not set(own.tolist()) & set(other.tolist())


def test_layers_clients_and_forks_do_not_share_a_stream():
    layer, client = SecureSource(), SecureSource()
    draws = [source.normal(torch.empty(100_000)) for source in (layer, layer, client)]
    for one in range(3):
        for other in range(one):
            assert abs(float((draws[one] * draws[other]).mean())) < 4.9 / 100_000**0.5
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, layer.uniform(torch.empty(8, dtype=torch.float64)).numpy().tobytes())
        os._exit(0)
    own = layer.uniform(torch.empty(8, dtype=torch.float64)).numpy()
    os.waitpid(child, 0)
    forked = np.frombuffer(os.read(read, 64))
    os.close(read)
    os.close(write)
    assert len(forked) == 8
    assert not set(forked) & set(own)
