"""Things by name: one registry each for defenses, attacks, modalities, models, data sets and engines."""

import dataclasses
import difflib
import inspect
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Generic, TypeVar

from gradveil.core import plugins
from gradveil.core.errors import ParameterError, UnknownNameError
from gradveil.core.parameters import check_declared, declared, left_out

T = TypeVar("T")
Spec = tuple[str, dict[str, Any]]


class Registry(Generic[T]):
    """Maps names to factories (classes or functions) of one kind.

    A name is taken once: registering it again is an error, so two methods can never shadow each other.

    Args:
        kind: what the registry holds, in the singular, as error messages should say it.
        group: the entry points by which installed packages add to it, see `gradveil.core.plugins`; None: they cannot.

    Example:
        >>> shapes = Registry[str]("shape")
        >>> @shapes.register("square")
        ... def square(side: int = 1) -> str:
        ...     return f"{side} x {side}"
        >>> shapes.create("square", side=3)
        '3 x 3'
        >>> shapes.create("sqare")
        Traceback (most recent call last):
            ...
        gradveil.core.errors.UnknownNameError: unknown shape 'sqare'; did you mean square?
        >>> shapes.create("square", length=3)
        Traceback (most recent call last):
            ...
        gradveil.core.errors.UnknownNameError: square: unknown parameter 'length'; it takes: side
    """

    def __init__(self, kind: str, group: str | None = None) -> None:
        self.kind, self.group = kind, group
        self._factories: dict[str, Callable[..., T]] = {}

    def register(self, name: str) -> Callable[[Callable[..., T]], Any]:
        """Decorator that files a class or function under `name`."""

        def file(factory: Callable[..., T]) -> Callable[..., T]:
            if name in self._factories:
                raise UnknownNameError(
                    f"{self.kind} {name!r} is registered already, by {self._factories[name].__qualname__}; "
                    "choose another name"
                )
            factory.name = name  # type: ignore[attr-defined]  # so that its messages can say who speaks
            self._factories[name] = factory
            return factory

        return file

    def names(self) -> list[str]:
        """All names, sorted."""
        if self.group is not None:
            plugins.load_installed(self.group, self._factories)
        return sorted(self._factories)

    def get(self, name: str, *others: str) -> Callable[..., T]:
        """The factory called `name`; unknown names raise an error that suggests the nearest ones, also of `others`."""
        if name not in self._factories and self.group is not None:
            plugins.load_installed(self.group, self._factories, name)
        if name not in self._factories:
            raise UnknownNameError(f"unknown {self.kind} {name!r}; {suggest(name, [*self.names(), *others])}")
        return self._factories[name]

    def create(self, name: str, /, *args: Any, **parameters: Any) -> T:
        """Build the thing called `name`."""
        factory = self.get(name)
        known = parameter_names(factory) if parameters else []
        for parameter in parameters:
            if parameter not in known:
                free = [one for one in known if one not in parameters]
                takes = ", ".join(free) or ("nothing else" if known else "no parameters")
                raise UnknownNameError(f"{name}: unknown parameter {parameter!r}; it takes: {takes}")
        return factory(*args, **parameters)


class Method:
    """A registered frozen dataclass whose declared fields are its parameters; its repr and str build it again.

    `factory` is the public function that does so. Fields are declared by `gradveil.core.parameters`, which check them;
    what ties several of them together is checked in `check`.

    Example:
        >>> from gradveil.core.parameters import number
        >>> @dataclasses.dataclass(frozen=True, repr=False)
        ... class Shift(Method):
        ...     name, factory = "shift", "gradveil.defense"
        ...     by: float = number(0.5, low=0)
        >>> Shift(), str(Shift())
        (gradveil.defense('shift', by=0.5), 'shift:by=0.5')
        >>> Shift(by=-1)
        Traceback (most recent call last):
            ...
        gradveil.core.errors.ParameterError: shift: by must be a number of at least 0, got -1
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    factory: ClassVar[str]
    caveat: str | None = None
    """What whoever reads a figure of this method must know, in a sentence; None: nothing."""

    parts: tuple["Method", ...] = ()
    """The methods it is made of."""

    @property
    def caveats(self) -> tuple[str, ...]:
        """Its caveat and those of its parts, each once."""
        parts = (caveat for part in self.parts for caveat in part.caveats)
        return tuple(dict.fromkeys(filter(None, [self.caveat, *parts])))

    def __post_init__(self) -> None:
        """Check the parameters."""
        check_declared(self)
        self.check()

    def check(self) -> None:
        """Refuse (`ParameterError`) parameters that do not go together."""

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters by name, as the factory takes them."""
        return {name: getattr(self, name) for name in declared(self)}

    def __str__(self) -> str:
        silent = left_out(self)
        return format_spec(self.name, {name: value for name, value in self.parameters.items() if name not in silent})

    def __repr__(self) -> str:
        arguments = "".join(f", {name}={value!r}" for name, value in self.parameters.items())
        return f"{self.factory}({self.name!r}{arguments})"


def parameter_names(factory: Callable[..., Any]) -> list[str]:
    """The keyword parameters a factory takes."""
    if dataclasses.is_dataclass(factory):
        return list(declared(factory))
    return list(inspect.signature(factory).parameters)


def suggest(name: str, known: Iterable[str]) -> str:
    """Words that lead from a mistyped name to the right one."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"known: {', '.join(names)}"


def parse_spec(text: str) -> Spec:
    """Read ``NAME`` or ``NAME:key=value,...`` as the command line takes it.

    >>> parse_spec("dual-pruning:k1=0.05,k2=.75")
    ('dual-pruning', {'k1': 0.05, 'k2': 0.75})
    >>> parse_spec("lenet:activation=relu,bias=true")
    ('lenet', {'activation': 'relu', 'bias': True})
    """
    name, colon, rest = text.strip().partition(":")
    if not name or (colon and not rest):
        raise ParameterError(f"expected NAME or NAME:key=value,..., got {text!r}")
    parameters: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not (key.strip() and equals and value.strip()):
            raise ParameterError(f"{name}: expected key=value, got {item!r}")
        if key.strip() in parameters:
            raise ParameterError(f"{name}: parameter {key.strip()!r} is given twice")
        parameters[key.strip()] = _parse_value(value.strip())
    return name, parameters


def format_spec(name: str, parameters: dict[str, Any]) -> str:
    """The text that `parse_spec` reads back.

    >>> format_spec("top-k", {"keep": 0.2})
    'top-k:keep=0.2'
    """
    if not parameters:
        return name
    return f"{name}:" + ",".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in parameters.items()
    )


def _parse_value(text: str) -> Any:
    if text in ("true", "false", "null"):  # as `format_spec` writes them
        return json.loads(text)
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text
