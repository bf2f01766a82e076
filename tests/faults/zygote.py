"""Runs programs in children of a process that has imported TensorFlow already.

A line on standard input names a program and its directory; the answer is the child's
process id, and its exit status when it ends. A child costs a fork instead of seconds of
imports.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback


def main() -> None:
    for module in ("keras_run", "correlated_run", "stream_run", "federated_run"):
        importlib.import_module(f"tests.faults.{module}").prepare()
    print("ready", flush=True)
    for line in sys.stdin:
        module, directory = line.rstrip("\n").split("\t")
        pid = os.fork()
        if not pid:
            _child(module, directory)
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)


def _child(module: str, directory: str) -> None:
    log = os.open(f"{directory}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        importlib.import_module(f"tests.faults.{module}").run(directory)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
