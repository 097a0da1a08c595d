"""Number formats: applying a precision recipe to a model, and checking that its results are right on this device."""

from deskside.config.recipes import RECIPES
from deskside.precision.convert import QuantizedModel, convert, restore
from deskside.precision.selfcheck import CheckResult, check

__all__ = ["RECIPES", "QuantizedModel", "convert", "restore", "check", "CheckResult"]
