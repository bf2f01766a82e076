"""Entry points of the targets in BUILD; not part of the package."""
