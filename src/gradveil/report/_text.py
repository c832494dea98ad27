"""Numbers and lists as people read them."""

from collections.abc import Sequence


def join(words: Sequence[str]) -> str:
    """A list in a sentence.

    >>> join(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def names(defenses: Sequence[str], most: int = 6) -> str:
    """Defenses in a sentence, or how many there are when nobody would read them all.

    >>> names(["top-k:keep=0.2", "precode"]), names(["top-k:keep=0.2", "precode"], most=1)
    ('`top-k:keep=0.2` and `precode`', '2 of the defenses')
    """
    if len(defenses) > most:
        return f"{len(defenses)} of the defenses"
    return join([f"`{defense}`" for defense in defenses])


def plural(count: int, noun: str) -> str:
    """A count with its noun.

    >>> plural(1, "image"), plural(3, "image"), plural(2, "batch")
    ('1 image', '3 images', '2 batches')
    """
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{ending}"


def percent(share: float) -> str:
    """A share as a percentage, with a decimal where rounding would say 0 or 100 and not mean it.

    >>> percent(0.934), percent(0.0042), percent(0.998), percent(1)
    ('93 %', '0.4 %', '99.8 %', '100 %')
    """
    value = 100 * share
    coarse = f"{value:.0f}"
    return f"{value:.1f} %" if coarse in ("0", "100") and f"{value:.1f}" != f"{coarse}.0" else f"{coarse} %"


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
    """A factor against the undefended run.

    >>> ratio(1.0), ratio(0.206), ratio(12.3)
    ('×1.00', '×0.21', '×12.3')
    """
    return f"×{value:.1f}" if value >= 9.995 else f"×{value:.2f}"
