"""The command that starts a worker refuses settings that would fail later."""

import os
import signal
import socket

import pytest

from tests.federated.remote_workers import free_port
from tfdpclip.federated import _tff, worker


@pytest.fixture
def executed(monkeypatch):
    """Records the command that would replace the process."""
    found = []
    monkeypatch.setattr(os, "execv", lambda path, command: found.append(command))
    monkeypatch.setattr(signal, "signal", lambda *arguments: found.append(arguments))
    return found


def test_it_becomes_the_worker_of_the_wheel_and_warns(executed, capsys):
    port = free_port()
    worker.main([f"--port={port}", "--concurrent_clients=3"])
    *signals, command = executed
    assert command == [
        _tff.worker_binary(),
        f"--port={port}",
        "--max_concurrent_computation_calls=3",
    ]
    # A background job's ignored interrupts would be inherited.
    assert (signal.SIGINT, signal.SIG_DFL) in signals
    printed = capsys.readouterr().out
    assert "ALL interfaces" in printed
    assert "without encryption or authentication" in printed


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_port_in_use_is_refused(executed, host):
    """gRPC would share the port, and calls would reach either process."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server(
        (host, 0), family=family, reuse_port=True, dualstack_ipv6=host == "::"
    ) as other:
        port = other.getsockname()[1]
        with pytest.raises(SystemExit, match=f"--port={port}: the port is in use"):
            worker.main([f"--port={port}"])
    assert executed == []
    worker.main([f"--port={port}"])
    assert executed


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--port"),
        (["--port=0"], "port from 1 to 65535"),
        (["--port=65536"], "port from 1 to 65535"),
        (["--port=http"], "port from 1 to 65535"),
        (["--port=10000", "--concurrent_clients=0"], "whole number, 1 or more"),
        (["--port=10000", "--threads=1"], "unrecognized"),
    ],
)
def test_wrong_arguments_are_refused(executed, capsys, arguments, message):
    with pytest.raises(SystemExit):
        worker.main(arguments)
    assert message in capsys.readouterr().err
    assert executed == []


def test_a_wheel_without_a_worker_is_a_sentence(monkeypatch):
    monkeypatch.setattr(_tff.tff, "__file__", "/nowhere/__init__.py")
    with pytest.raises(RuntimeError, match="/nowhere/data/worker_binary"):
        _tff.worker_binary()
