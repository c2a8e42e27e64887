"""The corpus: from files to the sequences a rank is fed."""

from typing import Final

IGNORED: Final = -100
"""A target that is not learned: padding, a prompt, the first token of the next document."""
