"""Every error kdatune raises on purpose.

KdatuneError
├── ShapeError            a problem shape or shape key that cannot be read (also a ValueError)
├── ConfigError           a config document that cannot be read (also a ValueError)
├── SnapshotError         a snapshot document that cannot be trusted (also a ValueError)
├── MeasurementError      a candidate failed on the card; carries its Outcome
├── StoreError            the database is missing, older than the code, or refuses the write
├── RecordingError        a sweep file that cannot be read, or that lacks what is asked of it
└── UsageError            a command was called with something it cannot work with

A message says what happened, with which key, and what to do about it.
"""

__all__ = [
    "ConfigError",
    "ExchangeError",
    "KdatuneError",
    "MeasurementError",
    "RecordingError",
    "ShapeError",
    "SnapshotError",
    "StoreError",
    "UsageError",
]


class KdatuneError(Exception):
    """Root of every error that kdatune raises on purpose."""


class ShapeError(KdatuneError, ValueError):
    """A problem shape or shape key cannot be read."""


class ConfigError(KdatuneError, ValueError):
    """A launch config document cannot be read."""


class SnapshotError(KdatuneError, ValueError):
    """A snapshot document is malformed, of another schema, or fails its checksum."""


class MeasurementError(KdatuneError):
    """A candidate failed on the card.

    Args:
        outcome: the typed outcome (an `Outcome` value) that the trial is stored with.
        detail: one line for people.
    """

    def __init__(self, outcome: str, detail: str) -> None:
        super().__init__(f"{outcome}: {detail}")
        self.outcome = outcome
        self.detail = detail


class StoreError(KdatuneError):
    """The database is missing, older than the code, or refuses the write."""


class RecordingError(KdatuneError):
    """A sweep file cannot be read, or lacks the shape or config asked of it."""


class UsageError(KdatuneError):
    """A command was called with something it cannot work with."""


class ExchangeError(KdatuneError):
    """A file of another tuner's format cannot be read, or says what cannot be."""
