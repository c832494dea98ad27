"""numpy's legacy normal noise: find out which draws were thrown away.

`numpy.random.normal` draws points of a square until one lies in the disc, so of five trials one leaves no trace, and
nobody tells the server which. The Mersenne Twister does. Squared, its recurrence ties three words together:

    x[k + 1248] + x[k + 794] = C x[k + 2], but for two of the 32 bits

A trial takes four outputs, and the high bits of the first and the third are seen. 1248 = 4 * 312 and 794 = 4 * 198 + 2,
so for even k all three words are seen ones: of trials t, t + 198 and t + 312, or of t, t + 198 and t + 311. With the 20
highest bits of each output known, 8 equations remain. A hypothesis "pairs i, j and l are 198 and 312 trials apart" is
tested by 8 bits, and with the pairs next to them by 24 and 40; there are some thousand hypotheses for each pair, so the
true ones stand out.
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

ACCEPTED = np.pi / 4
_MIDDLE, _LAST = 198, 312  # trials behind the first one of a relation
_SPREAD = 5.0  # standard deviations of the number of accepted trials that are searched
_DRIFT = 5  # pairs by which distances may change from one anchor to the next
# Relations of a pair that must hold: more than the two that an accident brings along; and how many of them may fail.
_FEWEST_HELD, _FAILED = 3, 0.25
_SURE = 0.8  # share of outputs in which a bit must be sure to be relied on
_FEWEST_BITS, _MOST_BITS = 17, 26

Ints = NDArray[np.int64]
_Relation = tuple[tuple[Ints, Ints, Ints], tuple[NDArray[np.bool_], ...], int]
"""Syndromes of the three pairs of a relation, where those are sure, and how many trials it spans."""


@dataclass(frozen=True)
class Alignment:
    """Which trials a run of pairs came from.

    Args:
        pairs: those whose trial is known.
        trials: the number of that trial, from an arbitrary one on.
    """

    pairs: Ints
    trials: Ints


def invert_polar(first: Floats, second: Floats, errors: tuple[Floats, Floats]) -> tuple[Floats, Floats, Floats]:
    """The two uniform numbers behind pairs of normal values, and how far off they may be.

    numpy returns x2 sqrt(-2 log(s) / s) first and x1 sqrt(-2 log(s) / s) next, s = x1^2 + x2^2, x = 2 u - 1.

    Returns:
        The number that was drawn first (behind the second value), the other, and the larger of their errors.
    """
    square = first**2 + second**2
    s = np.exp(-square / 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.where(square > 0, np.sqrt(s / square), 0.0)
        off = np.maximum(*errors)
        # d x / d value is at most factor (1 + square / 2), in any direction.
        error = np.where(square > 1e-9, factor * (1 + square / 2) * off * np.sqrt(2) / 2, 1.0)
    return (second * factor + 1) / 2, (first * factor + 1) / 2, error + 2.0**-50


def align(drawn_first: Floats, drawn_second: Floats, error: Floats, known: NDArray[np.bool_]) -> Alignment:
    """Which trials consecutive pairs came from, as far as relations between them tell.

    Args:
        drawn_first: the uniform number behind the first draw of each pair.
        drawn_second: behind the second draw.
        error: how far off they may be.
        known: which pairs were seen at all.
    """
    bits = _usable_bits(drawn_first[known], drawn_second[known], error[known])
    nothing = np.zeros(0, np.int64)
    if bits is None:
        return Alignment(nothing, nothing)
    near, far = _parity_checks(bits)
    one, two = (np.floor(u * 2.0**bits).astype(np.int64) for u in (drawn_first, drawn_second))
    # Relations (t, t + 198, t + 312): second, second, first draw; and (t, t + 198, t + 311): first, first, second.
    whole = (_syndromes(two, near), _syndromes(two, far), _syndromes(one, far))
    short = (_syndromes(one, near), _syndromes(one, far), _syndromes(two, far))
    for place, syndromes in enumerate((*whole, *short)):
        syndromes[~known] = 1 << 40 + place  # agrees with nothing
    found = _anchors(whole, short)
    if not len(found):
        return Alignment(nothing, nothing)
    pairs, trials = _fill(*_in_order(*_largest_group(found, len(one))), known)
    sure_one, sure_two = (_is_sure(u, error, bits) & known for u in (drawn_first, drawn_second))
    relations = (
        (whole, (sure_two, sure_two, sure_one), _LAST),
        (short, (sure_one, sure_one, sure_two), _LAST - 1),
    )
    supported = _supported(pairs, trials, relations)
    return Alignment(pairs[supported], trials[supported])


def _usable_bits(one: Floats, two: Floats, error: Floats) -> int | None:
    """The most high bits that are sure in most outputs; None: too few for any relation."""
    for bits in range(_MOST_BITS, _FEWEST_BITS - 1, -1):
        if np.mean([_is_sure(u, error, bits) for u in (one, two)]) > _SURE:
            return bits
    return None


def _is_sure(u: Floats, error: Floats, bits: int) -> NDArray[np.bool_]:
    """Where the high bits of a number are what they are, whatever the error."""
    sure: NDArray[np.bool_] = np.floor((u - error) * 2.0**bits) == np.floor((u + error) * 2.0**bits)
    return sure


def _parity_checks(bits: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Masks of the high `bits` of the first word of a relation, and of both others; one row for each check."""
    map_second, nuisance = mersenne.squared_recurrence()
    high = np.arange(32 - bits, 32)
    combinations = mersenne.left_null_space(np.c_[map_second[high][:, : 32 - bits], nuisance[high]])
    first = (combinations.astype(np.int64) @ map_second[high][:, high].astype(np.int64)) % 2
    weights = np.int64(1) << np.arange(bits)
    return first @ weights, combinations.astype(np.int64) @ weights


def _syndromes(words: Ints, masks: Ints) -> Ints:
    """The parities of `words` under all masks, as one number each."""
    result = np.zeros_like(words)
    for place, mask in enumerate(masks):
        value = words & mask
        for shift in (32, 16, 8, 4, 2, 1):
            value ^= value >> shift
        result |= (value & 1) << place
    return result


def _anchors(whole: tuple[Ints, Ints, Ints], short: tuple[Ints, Ints, Ints]) -> Ints:
    """Hypotheses (i, j, l) that hold for pairs i + 1, j + 1, l + 1 as well, ``[anchors, 3]``.

    Two neighbours are three relations, which is too few among all the hypotheses there are; but three neighbours are
    five, and tell about where j and l have to be looked for.
    """
    count = len(whole[0])
    middle, last = (_range(distance) for distance in (_MIDDLE, _LAST))
    twos: list[tuple[int, int, int]] = []
    threes: list[tuple[int, int, int]] = []
    for i in range(count - 2):
        j = i + middle[i + middle + 2 < count]
        k = i + last[i + last + 2 < count]
        if not len(j) or not len(k):
            continue
        rows, columns = np.nonzero((whole[0][i] ^ whole[1][j])[:, None] == whole[2][k][None, :])
        j, k = j[rows], k[columns]
        for step, found in ((1, twos), (2, threes)):
            keep = (whole[0][i + step] ^ whole[1][j + step]) == whole[2][k + step]
            keep &= (short[0][i + step] ^ short[1][j + step]) == short[2][k + step - 1]
            j, k = j[keep], k[keep]
            found += [(i, a, b) for a, b in zip(j.tolist(), k.tolist(), strict=True)]
    return _near(np.array(twos, np.int64).reshape(-1, 3), np.array(threes, np.int64).reshape(-1, 3))


def _near(anchors: Ints, surer: Ints) -> Ints:
    """Those anchors that the nearest of the surer ones supports."""
    if not len(surer):
        return surer
    after = np.clip(np.searchsorted(surer[:, 0], anchors[:, 0]), 1, len(surer) - 1) if len(surer) > 1 else 0
    distances = anchors - anchors[:, :1]
    expected = surer - surer[:, :1]
    close = [(np.abs(distances - expected[near]) <= _DRIFT).all(1) for near in (after, after - 1)]
    return anchors[close[0] | close[1]]


def _range(trials: int) -> Ints:
    """How many pairs later a trial so many trials later may be seen."""
    mean, spread = trials * ACCEPTED, _SPREAD * np.sqrt(trials * ACCEPTED * (1 - ACCEPTED))
    return np.arange(int(mean - spread), int(mean + spread) + 1)


def _largest_group(anchors: Ints, count: int) -> tuple[Ints, Ints]:
    """The most pairs whose distances in trials the anchors fix, and their trials.

    One in some hundred anchors is an accident. So groups are first made of distances that two anchors name, and then
    joined where a single anchor says so and the order of the pairs does not speak against it.
    """
    votes: Counter[tuple[int, int, int]] = Counter()
    for i, j, k in anchors.tolist():
        votes[i, j, _MIDDLE] += 1
        votes[i, k, _LAST] += 1
        for pair in (i, j, k):  # the relations of either kind that share pair k make these trials neighbours
            votes[pair, pair + 1, 1] += 1
    groups = _Groups(count)
    joined = True
    while joined:
        joined = groups.join_by_majority(votes)
    joined = True
    while joined:
        joined = False
        for pair, other, distance in votes:
            if groups.in_order(pair, other, distance):
                joined |= groups.join(pair, other, distance)
    trials, pairs = zip(*sorted(groups.largest().items()), strict=True)
    return np.array(pairs, np.int64), np.array(trials, np.int64)


class _Groups:
    """Groups of pairs whose distances in trials are known.

    Args:
        count: how many pairs there are; each starts as a group of its own.
    """

    def __init__(self, count: int) -> None:
        self._group = list(range(count))
        self._trial = [0] * count
        self._members = {pair: {0: pair} for pair in range(count)}  # trial -> pair

    def _between(self, pair: int, other: int, distance: int) -> tuple[int, int, int]:
        """The groups of two pairs, and how many trials the second begins after the first."""
        shift = self._trial[pair] + distance - self._trial[other]
        return self._group[pair], self._group[other], shift

    def join(self, pair: int, other: int, distance: int) -> bool:
        """`other` came `distance` trials after `pair`; False if known already, or if pairs would share a trial."""
        group, end, shift = self._between(pair, other, distance)
        if len(self._members[group]) < len(self._members[end]):
            group, end, shift = end, group, -shift
        if group == end or any(trial + shift in self._members[group] for trial in self._members[end]):
            return False
        for trial, member in self._members.pop(end).items():
            self._group[member], self._trial[member] = group, trial + shift
            self._members[group][trial + shift] = member
        return True

    def join_by_majority(self, votes: Mapping[tuple[int, int, int], int]) -> bool:
        """Join groups whose distance at least two votes (pair, other, distance) imply; whether there were any."""
        implied: Counter[tuple[int, int, int]] = Counter()
        for (pair, other, distance), number in votes.items():
            group, end, shift = self._between(pair, other, distance)
            if group != end:
                implied[(group, end, shift) if group < end else (end, group, -shift)] += number
        joined = False
        for (group, end, shift), number in implied.most_common():
            # Groups that were swallowed meanwhile are counted anew next time.
            if number > 1 and group in self._members and end in self._members:
                joined |= self.join(group, end, shift)  # a group is named after the pair at its trial 0
        return joined

    def in_order(self, pair: int, other: int, distance: int) -> bool:
        """Whether two groups can be joined so: of later pairs, at least as many trials before them were thrown away."""
        group, end, shift = self._between(pair, other, distance)
        if group == end:
            return False
        places = [(who, trial) for trial, who in self._members[group].items()]
        places += [(who, trial + shift) for trial, who in self._members[end].items()]
        places.sort()
        thrown = [trial - who for who, trial in places]
        return all(before <= after for before, after in pairwise(thrown))

    def largest(self) -> dict[int, int]:
        """The largest group: its trials, and the pair behind each."""
        return max(self._members.values(), key=len)


def _in_order(pairs: Ints, trials: Ints) -> tuple[Ints, Ints]:
    """Without pairs that cannot be where they are said to be: later pairs have thrown away at least as many trials."""
    thrown = (trials - pairs).tolist()
    ends: list[int] = []  # of the longest chain of each length, the index of its last pair
    before = [-1] * len(thrown)
    for index, value in enumerate(thrown):
        at = bisect_right(ends, value, key=thrown.__getitem__)
        before[index] = ends[at - 1] if at else -1
        ends[at : at + 1] = [index]
    chain = []
    index = ends[-1] if ends else -1
    while index >= 0:
        chain.append(index)
        index = before[index]
    return pairs[chain[::-1]], trials[chain[::-1]]


def _fill(pairs: Ints, trials: Ints, known: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """With the pairs between two that are as many trials apart as pairs: nothing was thrown away between them."""
    seen = list(zip(pairs.tolist(), trials.tolist(), strict=True))
    place = dict(seen)
    for (pair, trial), (next_pair, next_trial) in pairwise(seen):
        if next_pair - pair == next_trial - trial:
            place |= {between: between + trial - pair for between in range(pair, next_pair) if known[between]}
    ordered = np.array(sorted(place.items()), np.int64)
    return ordered[:, 0], ordered[:, 1]


def _supported(pairs: Ints, trials: Ints, relations: tuple[_Relation, ...]) -> NDArray[np.bool_]:
    """Which pairs have relations that hold: of wrong ones hardly any does, of right ones all that are sure."""
    first = int(trials.min())
    index = np.full(int(trials.max()) - first + 1 + _LAST, -1)
    index[trials - first] = np.arange(len(pairs))
    held, failed = np.zeros(len(pairs)), np.zeros(len(pairs))
    base = np.arange(len(index) - _LAST)
    for tables, sure, last in relations:
        trio = np.stack([index[base], index[base + _MIDDLE], index[base + last]])
        trio = trio[:, (trio >= 0).all(0)]
        one, two, three = pairs[trio]
        agree = tables[0][one] ^ tables[1][two] == tables[2][three]
        wrong = ~agree & sure[0][one] & sure[1][two] & sure[2][three]
        for role in trio:
            held += np.bincount(role, weights=agree, minlength=len(pairs))
            failed += np.bincount(role, weights=wrong, minlength=len(pairs))
    return (held >= _FEWEST_HELD) & (failed <= _FAILED * held)


def polar_normals(uniform: Floats) -> tuple[Floats, Ints]:
    """Pairs of normal values that numpy makes of uniform numbers, ``[pairs, 2]``, and the trial behind each."""
    one, two = 2 * uniform[0::2] - 1, 2 * uniform[1::2] - 1
    s = one * one + two * two
    trials = np.flatnonzero((s < 1) & (s != 0))
    factor = np.sqrt(-2 * np.log(s[trials]) / s[trials])
    return np.stack([two[trials] * factor, one[trials] * factor], axis=1), trials
