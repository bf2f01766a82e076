"""A worker for `dpc.federated.remote_context`, in the foreground.

    python -m tfdpclip.federated.worker --port=10000

Becomes the worker binary of TensorFlow Federated's wheel: signals reach the worker, and
it ends with this program. It listens on ALL interfaces, without encryption or
authentication, and runs every computation that it gets: keep it behind a private
network, a firewall or a tunnel.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Sequence

from tfdpclip.federated import _tff

_HELP = ("-h", "-help", "--help", "--helpshort", "--helpfull")


def _port(text):
    port = int(text)
    if not 1 <= port <= 65535:
        raise ValueError
    return port


def _count(text):
    count = int(text)
    if count < 1:
        raise ValueError
    return count


_port.__name__, _count.__name__ = "port from 1 to 65535", "whole number, 1 or more"


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(1, f"worker: error: {message} See --help.\n")


def _parser():
    parser = _Parser(
        prog="python -m tfdpclip.federated.worker",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument(*_HELP, action="help", help="Show this.")
    parser.add_argument(
        "--port", type=_port, required=True, help="where to listen, as in --port=10000"
    )
    parser.add_argument(
        "--concurrent_clients",
        type=_count,
        help="clients that are computed at the same time, at most: bounds memory",
    )
    return parser


def port_in_use(port: int) -> bool:
    """Whether another process listens on a port, on any interface.

    gRPC would share the port, and a call could reach either process.

    Args:
      port: the number.
    """
    for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            # Connections of a worker that has ended may linger.
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                tried.bind((host, port))
            except OSError:
                return True
    return False


def main(arguments: Sequence[str] | None = None) -> None:
    """Becomes the worker.

    Args:
      arguments: without the program's name; the process's arguments by default.

    Raises:
      SystemExit: if an argument is wrong or the port is in use.
    """
    given = _parser().parse_args(arguments)
    if port_in_use(given.port):
        raise SystemExit(
            f"worker: error: --port={given.port}: the port is in use. End the program "
            f"there, or use another, for example --port={given.port % 65535 + 1}."
        )
    command = [_tff.worker_binary(), f"--port={given.port}"]
    if given.concurrent_clients is not None:
        command.append(f"--max_concurrent_computation_calls={given.concurrent_clients}")
    print(
        f"A worker of TensorFlow Federated, on port {given.port} of ALL interfaces, "
        "without encryption or authentication: anyone who reaches the port can run "
        "code here and read clients' data. Keep it in a private network or behind a "
        "tunnel. Ctrl-C ends it.",
        flush=True,
    )
    # A shell's background jobs ignore interrupts, and the worker would inherit this.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
