"""The version of this software, said once: the package metadata takes it from here. The format has its own numbers."""

__version__ = "0.1.0"
