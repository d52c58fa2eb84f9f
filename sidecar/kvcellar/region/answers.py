"""What the kernel answers, said as a `KVCellarError` where a call leaves this package."""

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from kvcellar.errors import KVCellarError

_S = TypeVar("_S")
_P = ParamSpec("_P")
_T = TypeVar("_T")


def in_words(
    say: Callable[[_S, str, OSError], KVCellarError], *, but: tuple[type[OSError], ...] = ()
) -> Callable[[Callable[Concatenate[_S, _P], _T]], Callable[Concatenate[_S, _P], _T]]:
    """Decorate a function or method, so that its callers need to know no `OSError`.

    Args:
        say: makes the error of the first argument, the function's name and the kernel's answer.
        but: answers that pass as they are.
    """

    def decorate(
        function: Callable[Concatenate[_S, _P], _T],
    ) -> Callable[Concatenate[_S, _P], _T]:
        @functools.wraps(function)
        def call(first: _S, /, *arguments: _P.args, **options: _P.kwargs) -> _T:
            try:
                return function(first, *arguments, **options)
            except but:
                raise
            except OSError as error:
                raise say(first, function.__name__, error) from error

        return call

    return decorate
