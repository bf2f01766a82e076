"""The environments of the libraries that do not go together with TensorFlow 2.14.

    python -m benchmarks.peers.environments opacus jax

creates them in runs/peers, or in the directory that the variable
TFDPCLIP_PEER_ENVIRONMENTS names. PyTorch from the default index is its CUDA build,
several gigabytes; with an index or a directory of CPU builds in pip's configuration
(`extra-index-url`, `find-links`), or given by --find_links, pip takes the CPU build.
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.peers import installed
from driver_kit import command_line

_HERE = pathlib.Path(__file__).resolve().parent


def create(name: str, arguments: Sequence[str] = ()) -> None:
    """Creates an environment from its pinned requirements.

    Args:
      name: "opacus" or "jax".
      arguments: further arguments of pip install.

    Raises:
      ValueError: if there is no environment of that name.
      subprocess.CalledProcessError: if it cannot be installed.
    """
    if name not in installed.NAMES:
        raise ValueError(
            f"name must be one of {', '.join(installed.NAMES)}, got {name!r}."
        )
    target = installed.directory() / name
    partial = target.with_name(f"{name}.partial")
    subprocess.run([sys.executable, "-m", "venv", "--clear", partial], check=True)
    subprocess.run(
        [
            *(partial / "bin" / "python", "-m", "pip", "install", "--no-deps"),
            *("--disable-pip-version-check", "--quiet"),
            *("-r", _HERE / f"{name}-requirements.txt", *arguments),
        ],
        check=True,
    )
    # The environment's scripts know the path where it was made, its Python does not.
    shutil.rmtree(target, ignore_errors=True)
    partial.replace(target)


def main(argv: Sequence[str] | None = None) -> None:
    """Creates the environments that are named."""
    parser = command_line.argument_parser(__doc__)
    parser.add_argument("names", nargs="+", choices=installed.NAMES)
    parser.add_argument("--find_links", help="A directory of wheels, for pip.")
    options = parser.parse_args(argv)
    extra = ["--find-links", options.find_links] if options.find_links else []
    for name in options.names:
        create(name, extra)
        versions = installed.versions(name)
        print(name, *(f"{key} {value}" for key, value in versions.items()))


if __name__ == "__main__":
    main()
