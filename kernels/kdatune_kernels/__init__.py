"""KDA kernels, their config space, and the launcher. What a serving process installs."""

__version__ = "0.1.0"
