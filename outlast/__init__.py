"""Outlast: long-context language models, trained on whatever machines there are, through whatever befalls them."""

__version__ = "0.1.0"
