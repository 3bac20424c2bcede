"""The machine that models run on, knowing nothing of models.

`execution` resolves device, precision and compilation; `processes` is the only place that knows of process groups;
`cuda_graphs`, `stopwatch` and `peaks` serve whoever measures time.
"""
