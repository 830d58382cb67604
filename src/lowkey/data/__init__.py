"""Real mails that the package carries, and a non-private baseline to hold a result against."""

from __future__ import annotations

from lowkey.data.bag_of_words import BagOfWords as BagOfWords
from lowkey.data.bag_of_words import fit_bag_of_words as fit_bag_of_words
from lowkey.data.mails import Mail as Mail
from lowkey.data.mails import Mails as Mails
from lowkey.data.mails import load_mails as load_mails

__all__ = ["BagOfWords", "Mail", "Mails", "fit_bag_of_words", "load_mails"]
