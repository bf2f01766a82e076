"""What a reviewer of privacy reads. It imports nothing else of the library."""
