"""Numbers and lists formatted for readers."""

from collections.abc import Sequence


def join(words: Sequence[str]) -> str:
    """The words joined for use in a sentence.

    >>> join(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def names(defenses: Sequence[str], limit: int = 6) -> str:
    """Defenses joined for use in a sentence, or only their number if there are more than `limit`.

    >>> names(["top-k:keep=0.2", "precode"]), names(["top-k:keep=0.2", "precode"], limit=1)
    ('`top-k:keep=0.2` and `precode`', '2 of the defenses')
    """
    if len(defenses) > limit:
        return f"{len(defenses)} of the defenses"
    return join([f"`{defense}`" for defense in defenses])


def plural(count: int, noun: str) -> str:
    """A count with its noun.

    >>> plural(1, "image"), plural(3, "image"), plural(2, "batch"), plural(2, "pass")
    ('1 image', '3 images', '2 batches', '2 passes')
    """
    ending = "" if count == 1 else "es" if noun.endswith(("ch", "s")) else "s"
    return f"{count:,} {noun}{ending}"


def percent(share: float) -> str:
    """A share as a percentage, with one decimal if rounding would wrongly give 0 or 100.

    >>> percent(0.934), percent(0.0042), percent(0.998), percent(1)
    ('93 %', '0.4 %', '99.8 %', '100 %')
    """
    value = 100 * share
    rounded = f"{value:.0f}"
    return f"{value:.1f} %" if rounded in ("0", "100") and f"{value:.1f}" != f"{rounded}.0" else f"{rounded} %"


def size(count: float) -> str:
    """Bytes in decimal units.

    >>> size(999), size(57_576), size(44_690_000)
    ('999 B', '57.6 kB', '44.7 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def seconds(value: float) -> str:
    """A duration.

    >>> seconds(0.0042), seconds(3.21), seconds(754)
    ('4.2 ms', '3.2 s', '12 min 34 s')
    """
    if value < 1:
        return f"{1000 * value:.2g} ms" if value < 0.0995 else f"{1000 * value:.0f} ms"
    if value < 99.5:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s"


def ratio(value: float) -> str:
    """A ratio to the undefended run.

    >>> ratio(1.0), ratio(0.206), ratio(12.3)
    ('×1.00', '×0.21', '×12.3')
    """
    return f"×{value:.1f}" if value >= 9.995 else f"×{value:.2f}"
