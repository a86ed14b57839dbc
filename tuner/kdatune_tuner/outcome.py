"""How a measurement ended. A bad config is data: it gets one of these, it never ends a study."""

from enum import StrEnum


class Outcome(StrEnum):
    """The typed end of one measurement; only `OK` carries a time that counts."""

    OK = "ok"
    COMPILE_ERROR = "compile_error"
    RESOURCE = "resource"  # over the card's shared memory or registers
    LAUNCH_ERROR = "launch_error"
    ILLEGAL_ACCESS = "illegal_access"
    TIMEOUT = "timeout"
    ABORT = "abort"  # the process died: abort() in the compiler, a signal
    INCORRECT = "incorrect"
    NONDETERMINISTIC = "nondeterministic"

    @property
    def ok(self) -> bool:
        return self is Outcome.OK
