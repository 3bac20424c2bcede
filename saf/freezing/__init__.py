"""The whole recipe in one call: measure, choose, fit, install, report.

`recipe` holds `freeze_` and reads from top to bottom; `config` its settings, `choice` whom scores propose and whose fit
is accepted, `report` what came of it, `heldout` fits judged by sequences that they never saw, `storage`
how many bytes patterns take.
"""
