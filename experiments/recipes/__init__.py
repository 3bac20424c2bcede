"""One module a recipe, each with a RECIPE: the tables and figures of the paper."""
