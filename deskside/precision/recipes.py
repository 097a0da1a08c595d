"""Where recipes and their application were found before they were two things; see config/recipes.py and apply.py."""

from deskside.config.recipes import RECIPES, Recipe, recipe_named
from deskside.precision.apply import apply, restore

__all__ = ["RECIPES", "Recipe", "apply", "recipe_named", "restore"]
