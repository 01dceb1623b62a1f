"""Recipes: the algorithm of each method by name."""

from offbeat.recipes.methods import RECIPES
from offbeat.recipes.text import ALGORITHM_VARIABLE, algorithm

__all__ = ["ALGORITHM_VARIABLE", "RECIPES", "algorithm"]
