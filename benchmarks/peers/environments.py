"""The environments of the libraries that do not go together with TensorFlow 2.14.

    python -m benchmarks.peers.environments opacus jax

creates them in runs/peers, or in the directory that the variable
TFDPCLIP_PEER_ENVIRONMENTS names. PyTorch from the default index is its CUDA build,
several gigabytes; with an index or a directory of CPU builds in pip's configuration
(`extra-index-url`, `find-links`), or given by --find_links, pip takes that one.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence

import psutil

_HERE = pathlib.Path(__file__).resolve().parent
_VARIABLE = "TFDPCLIP_PEER_ENVIRONMENTS"
NAMES = ("opacus", "jax")
_PACKAGES = {
    "tensorflow": (
        "tensorflow",
        "keras",
        "tensorflow-privacy",
        "tensorflow-federated",
        "numpy",
    ),
    "opacus": ("torch", "opacus", "numpy"),
    "jax": ("jax", "jaxlib", "jax-privacy", "numpy"),
}
_VERSIONS = """
import importlib.metadata as metadata, json, sys
found = {"python": sys.version.split()[0]}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def directory() -> pathlib.Path:
    """Where the environments are."""
    given = os.environ.get(_VARIABLE)
    return pathlib.Path(given) if given else _HERE.parents[1] / "runs" / "peers"


def python_of(framework: str) -> str | None:
    """The Python that runs a framework, or None if its environment does not exist."""
    if framework in ("tensorflow", "federated"):
        return sys.executable
    found = directory() / framework / "bin" / "python"
    return str(found) if found.exists() else None


def how_to_create(framework: str) -> str:
    """What to say where there is no environment."""
    return (
        f"skipped {framework}: it has no environment here. Create it with: "
        f"python -m benchmarks.peers.environments {framework}"
    )


def create(name: str, arguments: Sequence[str] = ()) -> None:
    """Creates an environment from its pinned requirements.

    Args:
      name: "opacus" or "jax".
      arguments: further arguments of pip install.

    Raises:
      ValueError: if there is no environment of that name.
      subprocess.CalledProcessError: if it cannot be installed.
    """
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}.")
    target = directory() / name
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
    # The scripts in it know where it was made, its Python does not.
    shutil.rmtree(target, ignore_errors=True)
    partial.replace(target)


def versions(framework: str) -> dict[str, str]:
    """Versions of a framework's packages; empty if it has no environment."""
    python = python_of(framework)
    if python is None:
        return {}
    done = subprocess.run(
        [python, "-c", _VERSIONS, *_PACKAGES[framework]],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def machine() -> dict[str, str | int]:
    """The machine in words: no names, no paths."""
    model = ""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    return {
        "cpu": model or platform.processor() or platform.machine(),
        "cores": cores,
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": platform.system(),
    }


def record(output_dir: pathlib.Path, frameworks: Sequence[str]) -> None:
    """Writes the machine and the versions next to the results, or compares them.

    Raises:
      ValueError: if the results there are from another machine or other versions.
    """
    path = output_dir / "environment.json"
    now = {"machine": machine(), "versions": {}}
    now["versions"] = {name: found for name in frameworks if (found := versions(name))}
    if path.exists():
        before = json.loads(path.read_text())
        for name, found in before["versions"].items():
            now["versions"].setdefault(name, found)
        for name, found in now["versions"].items():
            before["versions"].setdefault(name, found)
        if before != now:
            raise ValueError(
                "output_dir has results from another machine or other versions "
                f"({path.name} says which). Use another --output_dir."
            )
    output_dir.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(now, indent=2, sort_keys=True) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Creates the environments that are named."""
    parser = argparse.ArgumentParser(description="Creates the peers' environments.")
    parser.add_argument("names", nargs="+", choices=NAMES)
    parser.add_argument("--find_links", help="A directory of wheels, for pip.")
    options = parser.parse_args(argv)
    extra = ["--find-links", options.find_links] if options.find_links else []
    for name in options.names:
        create(name, extra)
        print(name, *(f"{key} {value}" for key, value in versions(name).items()))


if __name__ == "__main__":
    main()
