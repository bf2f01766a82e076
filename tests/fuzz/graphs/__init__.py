"""Random graphs of raw ops: what the proof says of them, beside brute force."""
