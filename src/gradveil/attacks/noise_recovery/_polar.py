"""numpy's legacy normal noise: find out which draws were discarded.

`numpy.random.normal` draws points in a square until one lies in the disc, so about one trial in five leaves no trace,
and the server does not see which. The Mersenne Twister gives it away. The square of its recurrence ties three words
together:

    x[k + 1248] + x[k + 794] = C x[k + 2], except in two of the 32 bits

A trial takes four outputs, and the high bits of the first and the third are visible if the trial was accepted.
1248 = 4 * 312 and 794 = 4 * 198 + 2, so for even k all three words are visible: those of trials t, t + 198 and t + 312,
or of t, t + 198 and t + 311. With the 20 highest bits of each output known, 8 equations remain. The hypothesis "pairs j
and l came 198 and 312 trials after pair i" is tested by 8 bits, and together with the neighbouring pairs by 24 and 40.
There are some thousand hypotheses for each pair, so the true ones stand out.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gradveil.attacks.noise_recovery import _mersenne as mersenne
from gradveil.attacks.noise_recovery._observations import Floats

ACCEPTED = np.pi / 4  # the probability that a trial is accepted
_MIDDLE, _LAST = 198, 312  # trials after the first one of a relation
_SPREAD = 5.0  # how many standard deviations of the number of accepted trials are searched
_DRIFT = 5  # pairs by which distances may change from one anchor to the next
# How many relations of a pair must hold (a coincidence explains two), and what share of that number may fail.
_FEWEST_HELD, _FAILED = 3, 0.25
_MOSTLY = 0.8  # the share of outputs in which a bit must be certain to be used
_FEWEST_BITS, _MAX_BITS = 17, 26

Ints = NDArray[np.int64]
_Relation = tuple[tuple[Ints, Ints, Ints], tuple[NDArray[np.bool_], ...], int]
"""The syndromes of each pair in the three roles of a relation, whether these are certain, and the trials it spans."""


@dataclass(frozen=True)
class Alignment:
    """Which trials a sequence of pairs came from.

    Args:
        pairs: the pairs whose trial is known.
        trials: the number of each one's trial, counted from an arbitrary origin.
    """

    pairs: Ints
    trials: Ints


def invert_polar(first: Floats, second: Floats, errors: tuple[Floats, Floats]) -> tuple[Floats, Floats, Floats]:
    """The two uniform numbers behind pairs of normal values, and how far off they may be.

    numpy returns x2 sqrt(-2 log(s) / s) first and x1 sqrt(-2 log(s) / s) next, with s = x1^2 + x2^2 and x = 2 u - 1.

    Returns:
        The number that was drawn first (it belongs to the second value), the other, and the larger of their errors.
    """
    square = first**2 + second**2
    s = np.exp(-square / 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.where(square > 0, np.sqrt(s / square), 0.0)
        value_error = np.maximum(*errors)
        # d x / d value is at most factor (1 + square / 2), in any direction.
        error = np.where(square > 1e-9, factor * (1 + square / 2) * value_error * np.sqrt(2) / 2, 1.0)
    return (second * factor + 1) / 2, (first * factor + 1) / 2, error + 2.0**-50


def align(drawn_first: Floats, drawn_second: Floats, error: Floats, known: NDArray[np.bool_]) -> Alignment:
    """Find the trials that consecutive pairs came from, as far as the relations between them reveal it.

    Args:
        drawn_first: the uniform number drawn first for each pair.
        drawn_second: the one drawn second.
        error: how far off they may be.
        known: which pairs were seen at all.
    """
    bits = _usable_bits(drawn_first[known], drawn_second[known], error[known])
    nothing = np.zeros(0, np.int64)
    if bits is None:
        return Alignment(nothing, nothing)
    first_masks, later_masks = _parity_checks(bits)
    one, two = (np.floor(u * 2.0**bits).astype(np.int64) for u in (drawn_first, drawn_second))
    # A long relation takes the second, second and first draw of trials t, t + 198 and t + 312; a short one takes the
    # first, first and second draw of trials t, t + 198 and t + 311.
    long = (_syndromes(two, first_masks), _syndromes(two, later_masks), _syndromes(one, later_masks))
    short = (_syndromes(one, first_masks), _syndromes(one, later_masks), _syndromes(two, later_masks))
    for number, syndromes in enumerate((*long, *short)):
        syndromes[~known] = 1 << 40 + number  # agrees with nothing
    anchors = _anchors(long, short)
    if not len(anchors):
        return Alignment(nothing, nothing)
    pairs, trials = _fill(*_longest_ordered(*_largest_group(anchors, len(one))), known)
    certain_one, certain_two = (_is_certain(u, error, bits) & known for u in (drawn_first, drawn_second))
    relations = (
        (long, (certain_two, certain_two, certain_one), _LAST),
        (short, (certain_one, certain_one, certain_two), _LAST - 1),
    )
    supported = _supported(pairs, trials, relations)
    return Alignment(pairs[supported], trials[supported])


def _usable_bits(one: Floats, two: Floats, error: Floats) -> int | None:
    """How many high bits are certain in most outputs; None: too few for any relation."""
    for bits in range(_MAX_BITS, _FEWEST_BITS - 1, -1):
        if np.mean([_is_certain(u, error, bits) for u in (one, two)]) > _MOSTLY:
            return bits
    return None


def _is_certain(u: Floats, error: Floats, bits: int) -> NDArray[np.bool_]:
    """Whether the high bits of each number are the same throughout its error interval."""
    certain: NDArray[np.bool_] = np.floor((u - error) * 2.0**bits) == np.floor((u + error) * 2.0**bits)
    return certain


def _parity_checks(bits: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Masks for the high `bits` of the first word of a relation, and for those of both later words; one per check."""
    first_map, nuisance = mersenne.squared_recurrence()
    high = np.arange(32 - bits, 32)
    combinations = mersenne.left_null_space(np.c_[first_map[high][:, : 32 - bits], nuisance[high]])
    first = (combinations.astype(np.int64) @ first_map[high][:, high].astype(np.int64)) % 2
    weights = np.int64(1) << np.arange(bits)
    return first @ weights, combinations.astype(np.int64) @ weights


def _syndromes(words: Ints, masks: Ints) -> Ints:
    """The parities of each word under all masks, packed into one number per word."""
    result = np.zeros_like(words)
    for number, mask in enumerate(masks):
        value = words & mask
        for shift in (32, 16, 8, 4, 2, 1):
            value ^= value >> shift
        result |= (value & 1) << number
    return result


def _anchors(long: tuple[Ints, Ints, Ints], short: tuple[Ints, Ints, Ints]) -> Ints:
    """Hypotheses (i, j, k) that also hold for pairs i + 1, j + 1, k + 1, ``[anchors, 3]``.

    Two neighbours give three relations, which is too few among so many hypotheses. Three neighbours give five, and show
    roughly where j and k must lie for the others.
    """
    count = len(long[0])
    middle, last = (_range(distance) for distance in (_MIDDLE, _LAST))
    twos: list[tuple[int, int, int]] = []
    threes: list[tuple[int, int, int]] = []
    for i in range(count - 2):
        j = i + middle[i + middle + 2 < count]
        k = i + last[i + last + 2 < count]
        if not len(j) or not len(k):
            continue
        rows, columns = np.nonzero((long[0][i] ^ long[1][j])[:, None] == long[2][k][None, :])
        j, k = j[rows], k[columns]
        for step, found in ((1, twos), (2, threes)):
            keep = (long[0][i + step] ^ long[1][j + step]) == long[2][k + step]
            keep &= (short[0][i + step] ^ short[1][j + step]) == short[2][k + step - 1]
            j, k = j[keep], k[keep]
            found += [(i, a, b) for a, b in zip(j.tolist(), k.tolist(), strict=True)]
    return _near(np.array(twos, np.int64).reshape(-1, 3), np.array(threes, np.int64).reshape(-1, 3))


def _near(anchors: Ints, reliable: Ints) -> Ints:
    """The anchors whose distances are similar to those of the nearest reliable ones."""
    if not len(reliable):
        return reliable
    after = np.clip(np.searchsorted(reliable[:, 0], anchors[:, 0]), 1, len(reliable) - 1) if len(reliable) > 1 else 0
    distances = anchors - anchors[:, :1]
    expected = reliable - reliable[:, :1]
    close = [(np.abs(distances - expected[nearest]) <= _DRIFT).all(1) for nearest in (after, after - 1)]
    return anchors[close[0] | close[1]]


def _range(trials: int) -> Ints:
    """How many pairs may lie between two pairs that are `trials` trials apart."""
    mean, spread = trials * ACCEPTED, _SPREAD * np.sqrt(trials * ACCEPTED * (1 - ACCEPTED))
    return np.arange(int(mean - spread), int(mean + spread) + 1)


def _largest_group(anchors: Ints, count: int) -> tuple[Ints, Ints]:
    """The largest group of pairs whose distances in trials are fixed by the anchors, and their trials.

    One in some hundred anchors is a coincidence. So groups are first built from distances that two anchors agree on,
    and then joined if a single anchor says so and the order of the pairs does not contradict it.
    """
    votes: Counter[tuple[int, int, int]] = Counter()
    for i, j, k in anchors.tolist():
        votes[i, j, _MIDDLE] += 1
        votes[i, k, _LAST] += 1
        # The long relation of (i, j, k) and the short one of (i + 1, j + 1, k) share pair k, so these are neighbours.
        for pair in (i, j, k):
            votes[pair, pair + 1, 1] += 1
    groups = _Groups(count)
    joined = True
    while joined:
        joined = groups.join_by_majority(votes)
    joined = True
    while joined:
        joined = False
        for pair, other, distance in votes:
            if groups.would_be_ordered(pair, other, distance):
                joined |= groups.join(pair, other, distance)
    trials, pairs = zip(*sorted(groups.largest().items()), strict=True)
    return np.array(pairs, np.int64), np.array(trials, np.int64)


class _Groups:
    """Groups of pairs whose distances in trials are known.

    Args:
        count: number of pairs; each starts as a group of its own.
    """

    def __init__(self, count: int) -> None:
        self._group = list(range(count))
        self._trial = [0] * count
        self._members = {pair: {0: pair} for pair in range(count)}  # trial -> pair

    def _between(self, pair: int, other: int, distance: int) -> tuple[int, int, int]:
        """The groups of two pairs, and how many trials after the origin of the first that of the second lies."""
        shift = self._trial[pair] + distance - self._trial[other]
        return self._group[pair], self._group[other], shift

    def join(self, pair: int, other: int, distance: int) -> bool:
        """Record that `other` came `distance` trials after `pair`.

        Returns:
            False if the pairs are in one group already, or if two pairs would share a trial.
        """
        group, absorbed, shift = self._between(pair, other, distance)
        if len(self._members[group]) < len(self._members[absorbed]):
            group, absorbed, shift = absorbed, group, -shift
        if group == absorbed or any(trial + shift in self._members[group] for trial in self._members[absorbed]):
            return False
        for trial, member in self._members.pop(absorbed).items():
            self._group[member], self._trial[member] = group, trial + shift
            self._members[group][trial + shift] = member
        return True

    def join_by_majority(self, votes: Mapping[tuple[int, int, int], int]) -> bool:
        """Join groups whose distance at least two votes (pair, other, distance) imply; returns whether any joined."""
        implied: Counter[tuple[int, int, int]] = Counter()
        for (pair, other, distance), number in votes.items():
            group, other_group, shift = self._between(pair, other, distance)
            if group != other_group:
                key = (group, other_group, shift) if group < other_group else (other_group, group, -shift)
                implied[key] += number
        joined = False
        for (group, other_group, shift), number in implied.most_common():
            # Votes for groups that were absorbed in this round are counted again in the next.
            if number > 1 and group in self._members and other_group in self._members:
                joined |= self.join(group, other_group, shift)  # a group is named after the pair at its trial 0
        return joined

    def would_be_ordered(self, pair: int, other: int, distance: int) -> bool:
        """Whether two groups differ and can be joined: the number of discarded trials must never fall."""
        group, other_group, shift = self._between(pair, other, distance)
        if group == other_group:
            return False
        members = [(member, trial) for trial, member in self._members[group].items()]
        members += [(member, trial + shift) for trial, member in self._members[other_group].items()]
        members.sort()
        discarded = [trial - member for member, trial in members]
        return all(before <= after for before, after in pairwise(discarded))

    def largest(self) -> dict[int, int]:
        """The largest group, as a mapping from trials to pairs."""
        return max(self._members.values(), key=len)


def _longest_ordered(pairs: Ints, trials: Ints) -> tuple[Ints, Ints]:
    """Drop the fewest pairs such that the number of discarded trials never falls from one pair to the next."""
    discarded = (trials - pairs).tolist()
    ends: list[int] = []  # for each length, the index of the last pair of the best chain of that length
    previous = [-1] * len(discarded)
    for index, value in enumerate(discarded):
        length = bisect_right(ends, value, key=discarded.__getitem__)
        previous[index] = ends[length - 1] if length else -1
        ends[length : length + 1] = [index]
    chain = []
    index = ends[-1] if ends else -1
    while index >= 0:
        chain.append(index)
        index = previous[index]
    return pairs[chain[::-1]], trials[chain[::-1]]


def _fill(pairs: Ints, trials: Ints, known: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Add the pairs between two that are as many trials as pairs apart, because no trial between them was discarded."""
    aligned = list(zip(pairs.tolist(), trials.tolist(), strict=True))
    trial_of = dict(aligned)
    for (pair, trial), (next_pair, next_trial) in pairwise(aligned):
        if next_pair - pair == next_trial - trial:
            trial_of |= {between: between + trial - pair for between in range(pair, next_pair) if known[between]}
    ordered = np.array(sorted(trial_of.items()), np.int64)
    return ordered[:, 0], ordered[:, 1]


def _supported(pairs: Ints, trials: Ints, relations: tuple[_Relation, ...]) -> NDArray[np.bool_]:
    """Which pairs are supported by relations: hardly any hold for a wrong pair, all certain ones for a right one."""
    first = int(trials.min())
    index = np.full(int(trials.max()) - first + 1 + _LAST, -1)
    index[trials - first] = np.arange(len(pairs))
    held, failed = np.zeros(len(pairs)), np.zeros(len(pairs))
    base = np.arange(len(index) - _LAST)
    for syndromes, certain, last in relations:
        triples = np.stack([index[base], index[base + _MIDDLE], index[base + last]])
        triples = triples[:, (triples >= 0).all(0)]
        one, two, three = pairs[triples]
        holds = syndromes[0][one] ^ syndromes[1][two] == syndromes[2][three]
        fails = ~holds & certain[0][one] & certain[1][two] & certain[2][three]
        for role in triples:
            held += np.bincount(role, weights=holds, minlength=len(pairs))
            failed += np.bincount(role, weights=fails, minlength=len(pairs))
    return (held >= _FEWEST_HELD) & (failed <= _FAILED * held)


def polar_normals(uniform: Floats) -> tuple[Floats, Ints]:
    """The pairs of normal values that numpy makes from uniform numbers, ``[pairs, 2]``, and the trial of each."""
    one, two = 2 * uniform[0::2] - 1, 2 * uniform[1::2] - 1
    s = one * one + two * two
    trials = np.flatnonzero((s < 1) & (s != 0))
    factor = np.sqrt(-2 * np.log(s[trials]) / s[trials])
    return np.stack([two[trials] * factor, one[trials] * factor], axis=1), trials
