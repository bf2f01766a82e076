"""The entry point of every `py_binary` in BUILD: `python -m`, for Bazel.

Bazel starts `bin/keras_examples/digits.runfiles/tfdpclip/tools/run_module.py` for the
target `keras_examples/digits`, by `bazel run` or directly, so the path has the module.
"""

import pathlib
import runpy
import sys


def module_of(entry: pathlib.Path) -> str:
    """The module of the target that Bazel built.

    Args:
      entry: the path of this file among the target's runfiles, by which it was started.

    Raises:
      SystemExit: if Bazel did not start this file.
    """
    root = entry.absolute().parents[1]
    target = root.parent.with_suffix("").parts
    for start in range(1, len(target)):
        if root.joinpath(*target[start:]).with_suffix(".py").is_file():
            return ".".join(target[start:])
    raise SystemExit("Only Bazel starts this file. Run python -m PROGRAM.")


if __name__ == "__main__":
    module = module_of(pathlib.Path(sys.argv[0]))
    runpy.run_module(module, run_name="__main__", alter_sys=True)
