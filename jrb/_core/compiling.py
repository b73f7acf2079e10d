"""How the verbs are compiled."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax

from jrb._xla import gather
from jrb._xla.arguments import entry

F = TypeVar("F", bound=Callable[..., Any])


def per_description(
    *static: str, donated: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[[Any], Any]]:
    """Makes a function whose first argument is a description one that compiles it for that.

    A call of what it gives looks at arrays alone. Passed to one compiled function for all, the
    description would be compared field by field at every call. Inside another compiled function it
    is traced once and becomes a part of that: a function of its own would have to be lowered,
    called and inlined again by XLA.

    Args:
        static: the names of other arguments that are no arrays.
        donated: the names of those that are donated.
    """

    def decorated(function: Callable[..., Any]) -> Callable[[Any], Any]:
        @functools.lru_cache(maxsize=1024)
        def compiled(description: Any, few: gather.Few) -> Any:
            return jax.jit(
                functools.partial(gather.traced_for(few, entry(function)), description),
                static_argnames=static,
                donate_argnames=donated,
                inline=True,
            )

        return lambda description: compiled(description, gather.few_now())

    return decorated


def by_description(*static: str, donated: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Compiles a function once for each description, its first argument (see `per_description`).

    Args:
        static: the names of other arguments that are no arrays.
        donated: the names of those that are donated.
    """

    def decorated(function: F) -> F:
        compiled = per_description(*static, donated=donated)(function)

        @functools.wraps(function)
        def called(description: Any, *args: Any, **kwargs: Any) -> Any:
            return compiled(description)(*args, **kwargs)

        return cast(F, called)

    return decorated
