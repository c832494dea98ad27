"""Metrics as records in a registry, over which the scorer, rows, tables, charts and flags iterate."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import Tensor

from gradveil.core import plugins
from gradveil.core.errors import UnknownNameError
from gradveil.core.registry import suggest
from gradveil.modality import Modality

Compute = Callable[[Tensor, Tensor], Tensor | None]
F = TypeVar("F", bound=Compute)


@dataclass(frozen=True)
class Metric:
    """How close a reconstruction comes to the original, as one number per example.

    Args:
        name: its key in rows and configs.
        title: its name in tables.
        compute: ``(originals, found)``, both as `Modality.compared` has them (for images ``[N, *input_shape]``), in
            range and matched one to one: one number per example ``[N]``, or None if it cannot be computed, see
            `remedy`.
        better: ``"higher"`` or ``"lower"``: which values are closer to the original.
        summary: what it means, in a sentence or two for the glossary of a report.
        modalities: the names of the modalities it is for.
        unit: the unit of its values, if they have one.
        digits: number of decimals shown to readers.
        low: the smallest possible value.
        high: the largest possible value.
        noticeable: the smallest difference worth mentioning.
        optional: whether it may be None; rows then hold null.
        remedy: the command that gets what is missing when it is None.
        compares: whether it uses the original; if not, it looks only at the reconstruction.
        column: whether tables have a column for it.
        second_opinion: for a distance (0 is equal) that may contradict the verdict, why it may; a report then says
            where it does.

    Example:
        >>> error = Metric(
        ...     "largest_error",
        ...     "Largest error",
        ...     lambda originals, found: (originals - found).abs().flatten(1).amax(1),
        ...     better="lower",
        ...     summary="The largest difference of any two values.",
        ...     modalities=("image",),
        ...     low=0.0,
        ... )
        >>> error.with_unit(0.126), error.closeness(0.126)
        ('0.13', -0.126)
    """

    name: str
    title: str
    compute: Compute
    better: Literal["higher", "lower"]
    summary: str
    modalities: tuple[str, ...]
    unit: str = ""
    digits: int = 2
    low: float = -math.inf
    high: float = math.inf
    noticeable: float = 0.0
    optional: bool = False
    remedy: str | None = None
    compares: bool = True
    column: bool = True
    second_opinion: str | None = None

    @property
    def heading(self) -> str:
        """Its title with its unit."""
        return f"{self.title} {self.unit}".rstrip()

    @property
    def worse(self) -> str:
        """Whether worse values lie below or above better ones."""
        return "below" if self.better == "higher" else "above"

    def without_unit(self, value: float) -> str:
        """A value as shown to readers, without its unit."""
        return f"{round(value, self.digits) + 0:.{self.digits}f}"  # adding zero turns -0.0 into 0.0

    def with_unit(self, value: float) -> str:
        """A value as shown to readers, with its unit."""
        return f"{self.without_unit(value)} {self.unit}".rstrip()

    def closeness(self, value: float) -> float:
        """The value with its sign chosen so that higher is always closer to the original."""
        return value if self.better == "higher" else -value


class Metrics:
    """All metrics by name; a name is taken once. Installed packages add theirs by entry points ``gradveil.metrics``.

    Example:
        >>> from gradveil.modality import IMAGE
        >>> [metric.name for metric in METRICS.of(IMAGE)]
        ['mse', 'psnr', 'psnr_blurred', 'ssim', 'ssim_blurred', 'lpips', 'noise_ratio']
    """

    group = "gradveil.metrics"

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def add(self, metric: Metric) -> Metric:
        """Make a metric part of every audit of its modalities."""
        if metric.name in self._metrics:
            raise UnknownNameError(f"metric {metric.name!r} is registered already; choose another name")
        self._metrics[metric.name] = metric
        return metric

    def get(self, name: str) -> Metric:
        """The metric of that name."""
        if name not in self._metrics:
            plugins.load_installed(self.group, self._metrics, name)
        if name not in self._metrics:
            raise UnknownNameError(f"unknown metric {name!r}; {suggest(name, self._metrics)}")
        return self._metrics[name]

    def names(self) -> list[str]:
        """All names, sorted."""
        plugins.load_installed(self.group, self._metrics)
        return sorted(self._metrics)

    def of(self, modality: Modality) -> list[Metric]:
        """Those for a modality, in one order wherever they come from: those that are always there first."""
        plugins.load_installed(self.group, self._metrics)
        mine = (metric for metric in self._metrics.values() if modality.name in metric.modalities)
        return sorted(mine, key=lambda metric: (not metric.compares, metric.optional, metric.name))


METRICS = Metrics()


def metric(name: str, title: str, **fields: Any) -> Callable[[F], F]:
    """Decorator that registers a function as a metric.

    The summary is the paragraph ``In words: ...`` of its docstring; a paragraph ``Second opinion: ...`` is optional.

    Args:
        name: the name of the `Metric`.
        title: its title.
        fields: its other fields.
    """

    def register(compute: F) -> F:
        paragraphs = [" ".join(part.split()) for part in (inspect.getdoc(compute) or "").split("\n\n")]
        labelled = dict(part.split(": ", 1) for part in paragraphs if ": " in part)
        summary, second_opinion = labelled.get("In words", ""), labelled.get("Second opinion")
        METRICS.add(Metric(name, title, compute, summary=summary, second_opinion=second_opinion, **fields))
        return compute

    return register
