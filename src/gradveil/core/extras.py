"""Packages that only a part of gradveil needs, so that a client that only defends need not install them."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from gradveil.core.errors import MissingPackageError

AUDIT = ("scipy", "PIL", "jinja2", "platformdirs", "dp_accounting")
"""The packages that the extra ``audit`` brings, by the names under which they are imported."""


class OptionalModule:
    """A module that is imported when something in it is first used; if it is missing, the error says what to install.

    Args:
        name: the module.
        user: what needs it, as the subject of a sentence.
        extra: the extra of gradveil that brings it.

    Example:
        >>> leaves = OptionalModule("tea_leaves", "fortune telling")
        >>> leaves.read()
        Traceback (most recent call last):
            ...
        gradveil.core.errors.MissingPackageError: fortune telling needs tea_leaves: pip install 'gradveil[audit]'
    """

    def __init__(self, name: str, user: str, extra: str = "audit") -> None:
        self._name, self._user, self._extra = name, user, extra

    def __getattr__(self, attribute: str) -> Any:
        try:
            module = import_module(self._name)
        except ModuleNotFoundError as error:
            raise missing(self._user, error.name or self._name, self._extra) from error
        return getattr(module, attribute)


def require(user: str, packages: tuple[str, ...], extra: str = "audit") -> None:
    """Raise an error that says what to install unless all of these packages are there.

    >>> require("counting", ("math", "json"))
    """
    for package in packages:
        if find_spec(package) is None:
            raise missing(user, package, extra)


def missing(user: str, package: str, extra: str) -> MissingPackageError:
    """The error for a package that is not installed."""
    return MissingPackageError(f"{user} needs {package.partition('.')[0]}: pip install 'gradveil[{extra}]'")
