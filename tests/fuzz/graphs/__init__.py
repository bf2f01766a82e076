"""Random graphs of raw ops: the proof's verdicts compared with brute force."""
