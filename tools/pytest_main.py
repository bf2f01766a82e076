"""The entry point of every `py_test` in BUILD: runs pytest on the given files.

Bazel runs a test as a program, and a pytest file run as a program tests nothing.
"""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:]))
