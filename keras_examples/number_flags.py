"""Number flags whose errors name the flag, its range and a value that works."""

from __future__ import annotations

import math

from absl import flags

# Flags defined here belong to the program that asked for them, also in its --help.
flags.disclaim_key_flags()


class NumberParser(flags.ArgumentParser):
    """Parses one number in a range.

    Args:
      good: A value that works, for the error message.
      integer: Whether the number must be whole.
      above: The number must be greater than this.
      least: The number must be at least this.
      below: The number must be less than this.
      most: The number must be at most this.
      infinite: Whether `inf` is allowed.

    >>> NumberParser(good=3, above=0, infinite=True).parse("inf")
    inf
    >>> NumberParser(good=60, integer=True, least=1).parse("0")
    Traceback (most recent call last):
        ...
    ValueError: must be a whole number, 1 or more, for example 60.
    """

    def __init__(
        self,
        *,
        good: float,
        integer: bool = False,
        above: float | None = None,
        least: float | None = None,
        below: float | None = None,
        most: float | None = None,
        infinite: bool = False,
    ):
        super().__init__()
        self.good = good
        self.integer = integer
        self.infinite = infinite
        self._bounds = (
            (above, "above", lambda number, bound: number > bound),
            (least, "or more", lambda number, bound: number >= bound),
            (below, "below", lambda number, bound: number < bound),
            (most, "at most", lambda number, bound: number <= bound),
        )
        self.syntactic_help = self.requirement()

    def parse(self, argument):
        try:
            number = int(argument) if self.integer else float(argument)
        except (TypeError, ValueError):
            number = math.nan
        in_range = all(
            bound is None or holds(number, bound) for bound, _, holds in self._bounds
        )
        finite = math.isfinite(number) or (self.infinite and number == math.inf)
        if not (in_range and finite):
            raise ValueError(f"must be {self.requirement()}, for example {self.good}.")
        return number

    def flag_type(self):
        return "int" if self.integer else "float"

    def requirement(self) -> str:
        """Returns what the number must be, in words."""
        words = "a whole number" if self.integer else "a number"
        bounds = [
            f"{bound:.12g} {name}" if name == "or more" else f"{name} {bound:.12g}"
            for bound, name, _ in self._bounds
            if bound is not None
        ]
        if bounds:
            separator = ", " if bounds[0].endswith("or more") else " "
            words += separator + " and ".join(bounds)
        return words + (", or inf" if self.infinite else "")


def define_number(name: str, default: float | None, text: str, **requirement):
    """Defines a flag for one number; `requirement` is for `NumberParser`.

    Returns:
      The `FlagHolder`.
    """
    parser = NumberParser(**requirement)
    serializer = flags.ArgumentSerializer()
    return flags.DEFINE(parser, name, default, text, serializer=serializer)
