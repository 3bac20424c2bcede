"""The paper's tables and figures: arms and recipes as data, a runner, tables from records. See docs/experiments.md."""
