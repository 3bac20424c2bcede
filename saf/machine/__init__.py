"""The machine that models run on: execution, processes, CUDA graphs, stopwatch, peaks."""
