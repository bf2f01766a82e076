"""Workers for libraries that need an environment of their own."""
