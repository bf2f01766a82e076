"""The installed libraries with their versions, the environments, and the machine."""

from __future__ import annotations

import json
import os
import pathlib
import platform
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
    if framework in ("tensorflow", "federated", "federated_tasks"):
        return sys.executable
    found = directory() / framework / "bin" / "python"
    return str(found) if found.exists() else None


def how_to_create(framework: str) -> str:
    """The message where there is no environment."""
    return (
        f"skipped {framework}: it has no environment here. Create it with: "
        f"python -m benchmarks.peers.environments {framework}"
    )


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
