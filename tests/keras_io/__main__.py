"""Trains the models of keras.io's examples, and writes docs/keras_examples.md.

    python -m tests.keras_io            # all examples, most of an hour on two cores
    python -m tests.keras_io GAN VAE    # examples with one of these in their names

A stack writes its own column, and leaves the second stack's column as it is.
"""

from __future__ import annotations

import sys

from tests.keras_io import check, page
from tests.keras_io.examples import GROUPS

#: How many steps an example takes for the page.
STEPS = 100


def main(words: list[str]) -> None:
    """Trains the examples whose names contain a given word, or all."""
    for examples in GROUPS.values():
        for name, example in examples.items():
            if words and not any(word.lower() in name.lower() for word in words):
                continue
            try:
                cell = check.outcome(example, STEPS)
            except Exception as error:
                # The remaining examples are trained, and this line stays as it is.
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
                continue
            print(f"{name}: {cell}", flush=True)
            page.update({name: cell})


if __name__ == "__main__":
    main(sys.argv[1:])
