"""Everything a user can be told went wrong.

OutlastError                 the house's own: one clear message, no traceback          exit 70
├── UsageError               the command line or the run file asks for what cannot be  exit 2
├── DataError                a corpus, tokeniser or record cannot be used              exit 2
├── WeightsError             a model directory does not fit                            exit 2
├── ResumeError              the run folder holds another run                          exit 2
├── StorageError             a disk is full, read-only or lost what was written        exit 70
├── DivergedError            the loss or the gradients are no longer numbers           exit 70
├── RanksDifferError         what should be the same on several ranks is not           exit 70
└── PeerError                another process of the run is gone                        exit 75

Exit codes: 0 done · 2 mend the command, file or data · 70 do not start again as it is · 75 start me again ·
130 ended by ctrl-C; the same command goes on.
"""

import difflib
from collections.abc import Iterable
from typing import Final

DONE: Final = 0
USAGE: Final = 2
DO_NOT_RESTART: Final = 70
RESTART: Final = 75
INTERRUPTED: Final = 130


class OutlastError(Exception):
    """One mistake or mishap, told so that the reader can act on it.

    Args:
        what: what is wrong, with the values, in lower case and without a full stop.
        fix: what to do about it.
        where: the file, line, rank or sample it was found at.
        key: the knob at fault, dotted; the command line turns it into where that knob was set.
    """

    exit_code = DO_NOT_RESTART

    def __init__(self, what: str, *, fix: str = "", where: str = "", key: str = "") -> None:
        super().__init__(what)
        self.what, self.fix, self.where, self.key = what, fix, where, key

    def __str__(self) -> str:
        """The message as the terminal shows it: what, then what to do, then where, a line each."""
        return "\n  ".join(part for part in (self.what, self.fix, self.where) if part)


class UsageError(OutlastError):
    """The command line or the run file asks for something that cannot be."""

    exit_code = USAGE


class DataError(OutlastError):
    """A corpus, a tokeniser or a record cannot be used."""

    exit_code = USAGE


class WeightsError(OutlastError):
    """A model directory cannot be read, or does not fit the run."""

    exit_code = USAGE


class ResumeError(OutlastError):
    """The run folder holds a run that this command would not continue."""

    exit_code = USAGE


class StorageError(OutlastError):
    """What was to be kept could not be written, or what was written cannot be read back."""


class DivergedError(OutlastError):
    """The loss or the gradient norm is no longer a number."""


class RanksDifferError(OutlastError):
    """What should be the same on several ranks is not, or what should differ is the same."""


class PeerError(OutlastError):
    """Another process of the run is gone: never the first cause, which is what ended that process."""

    exit_code = RESTART


def nearest(word: str, known: Iterable[str]) -> str:
    """Suggest the known word closest to a mistyped one; both may be dotted.

    Returns:
        ``perhaps you meant X``: one of the same section, else one of that name elsewhere. Where nothing is close, all
        that section has, or which sections there are.
    """
    choices, section, name = list(known), *word.rpartition(".")[::2]
    beside = [choice for choice in choices if choice.rpartition(".")[0] == section]
    for among, least in ((beside, 0.6), (choices, 0.8)):
        names = {choice.rpartition(".")[2]: choice for choice in among}
        if close := difflib.get_close_matches(name, names, n=1, cutoff=least):
            return f"perhaps you meant {names[close[0]]}"
    sections = dict.fromkeys(choice.rpartition(".")[0] for choice in choices)
    sections.pop("", None)
    return "known: " + ", ".join(
        beside if section and beside else [*beside, *(f"{name}.…" for name in sections)] or choices
    )
