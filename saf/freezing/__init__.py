"""The whole recipe in one call: measure, choose, fit, install, report."""
