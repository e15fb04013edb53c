"""The version, in its one place: packaging and CMake read it from here."""

__version__ = "0.1.0"
