"""Number formats: recipes that are applied to a model from outside, and the check that they compute right here."""

from deskside.precision.recipes import RECIPES, apply, restore
from deskside.precision.selfcheck import CheckResult, check

__all__ = ["RECIPES", "apply", "restore", "check", "CheckResult"]
