"""Number formats: recipes that are applied to a model from outside, and the check that they compute right here."""

from deskside.config.recipes import RECIPES
from deskside.precision.convert import QuantizedModel, convert, restore
from deskside.precision.selfcheck import CheckResult, check

__all__ = ["RECIPES", "QuantizedModel", "convert", "restore", "check", "CheckResult"]
