"""The recipes of the paper's tables and figures, a module a subject: each has RECIPES by name."""
