"""The paper's numbers as its text prints them, by table or section.

"When Can Attention Heads Be Statically Defined?" (Selective Attention Freezing). All its systems measurements are on
GH200 in bfloat16 with ordinary heads on flash attention; whether models were compiled is not said.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """A table (`tab:...` in the paper's source) or section, and the conditions of its numbers."""

    label: str
    conditions: str

    @property
    def note(self) -> str:
        """The note below a table with numbers of it."""
        return f"Paper, {NUMBERED.get(self.label, self.label)}: {self.conditions}."


# --- text as data


def split_words(text: str) -> tuple[str, ...]:
    """Return the words of a text: a long list of names, written without quotation marks."""
    return tuple(text.split())


def lines(text: str, *more: str) -> list[dict[str, str]]:
    """Return the cells of each line of a table by the names of its first line; "|" parts them, empty ones are out.

    `more` are further columns of the same lines.
    """
    names, *body = (
        [cell.strip() for cell in line.split("|")] for line in text.strip("\n").splitlines() if line.strip()
    )
    if wrong := [line for line in body if len(line) != len(names)]:
        raise ValueError(f"a row must have the {len(names)} cells of {' | '.join(names)}, got {' | '.join(wrong[0])}")
    table = [{name: cell for name, cell in zip(names, line, strict=True) if cell} for line in body]
    return [line | others for line, others in zip(table, lines(*more), strict=True)] if more else table


# --- where numbers stand

_FLASH = "GH200, bfloat16, ordinary heads on flash attention"
QUALITY = Source(
    "tab:main-results", "perplexity of 124M, mean ± SE of three seeds, 5,000 updates of 491,520 tokens, frozen halfway"
)
RATES = Source("tab:training-systems-details", f"124M, {_FLASH}, T=4096, B=8, 15 micro-batches an update")
NATIVE = Source(
    "tab:pruning-native-systems",
    f"124M, {_FLASH}, six micro-batches of the largest batch that fits; the ratio is that of the two times it gives",
)
ONE_B = Source("tab:scale-up-systems", f"1B, one {_FLASH}, 131,072 tokens an update; medians of pairs")
ONE_B_TEXT = Source("sec:scale-up-results", "1B, one seed, 19.667B tokens, frozen halfway")
PREFILL = Source(
    "tab:prefill-latency", f"124M trained at 16K, {_FLASH}, no graph replay; medians of fresh-process pairs"
)
QWEN = Source("tab:qwen-prefill-details", f"Qwen3-4B, prefill, end to end or attention alone, {_FLASH}")
QWEN_ZERO_SHOT = Source(
    "tab:qwen-zeroshot", "Qwen3-4B, 512 calibration sequences of FineWeb-Edu, no further training; bfloat16"
)
COSTS = Source(
    "tab:intervention-costs",
    "seconds, one GH200, 32 sequences of 4,096 (124M, mean ± SE of three seeds) or 16 of 8,192 (1B, one seed)",
)
DISTRIBUTIONS = Source("app:dirichlet-fit", "124M at 1K, halfway; 36 heads, six queries, fitted to 300 sequences")
SELECTORS = Source("tab:selector-diagnostic", "124M at 4K, halfway; 118 of 144 heads fit")
SELECTION_TEXT = Source("app:head-selection-analysis", "124M at 4K, halfway; 25% of heads by variance")
RECOVERY = Source("fig:replacement-recovery", "124M at 4K; 25% of heads, mean of 210 updates, one seed")
IMPLEMENTATION = Source(
    "tab:implementation-validation", "124M at 4K, 36 heads in 10 layers; the forward checks on nanoGPT in fp32"
)
GEOMETRY = Source("tab:prior-geometry-correlation", "124M at 4K; five patterns within each rate")

TABLES = split_words("""
    fixed-token-controls-main main-results scale-up-results prior-geometry-correlation selector-diagnostic
    kl-continuation-selector decision-points timing-main schedule-details schedule-confirmation
    training-systems-details fixed-token-controls-full intervention-costs pattern-controls equal-time-controls
    pruning-additional-training pruning-downstream mqar-complete pruning-native-systems pruning-prefill
    downstream-details finetuning-schedules scale-up-systems scale-up-downstream qwen-zeroshot qwen-prefill-details
    implementation-validation gradient-errors prefill-latency resource-licences
""")
"""Labels of the paper's tables in the order of their numbers, without "tab:"."""
FIGURES = split_words("""
    overview compact-kernel prior-quality systems-across-stages mqar-generalisation qwen-pretrained-tasks
    head-selection-profiles replacement-recovery attention-entry-distributions dirichlet-umap
""")
NUMBERED = {f"tab:{label}": f"Table {number}" for number, label in enumerate(TABLES, 1)}
NUMBERED |= {f"fig:{label}": f"Figure {number}" for number, label in enumerate(FIGURES, 1)}
NUMBERED["tab:representation-details"] = NUMBERED["tab:implementation-validation"]
"""Numbers by label; two labels are of one table."""


# --- speed and memory

Point = tuple[str, str, int, int, str]
"""What was measured, model, tokens of context, sequences, and which heads: frozen or pruned ones."""


def _by_point(text: str) -> dict[Point, dict[float, str]]:
    """Return numbers by point and rate."""
    table = {}
    for line in lines(text):
        what, model, length, size, heads = (line.pop(name) for name in ("of", "model", "length", "batch", "heads"))
        table[what, model, int(length), int(size), heads] = {float(rate): cell for rate, cell in line.items()}
    return table


# "plotted" is where the paper draws a point and prints no number.
SPEEDS = _by_point("""
    of        | model    | length | batch | heads  | 0.1     | 0.2    | 0.25             | 0.3    | 0.5              | 0.75    | 1
    update    | 124m     | 4096   | 2     | frozen | plotted |        | plotted          |        | plotted          | plotted |
    update    | 124m     | 4096   | 4     | frozen | plotted |        | plotted          |        | plotted          | plotted |
    update    | 124m     | 4096   | 8     | frozen | 1.016×  |        | 1.056×           |        | 1.119×           | 1.215×  |
    update    | 124m     | 8192   | 4     | frozen |         |        | 1.030×           |        | 1.101×           |         |
    update    | 124m     | 16384  | 2     | frozen |         |        | 1.025×           |        | 1.070×           |         |
    update    | 1b       | 8192   | 1     | frozen |         |        | 1.067×           |        | 1.163×           |         |
    update    | 1b       | 8192   | 2     | frozen |         |        | 1.066×           |        | 1.165×           |         |
    four GPUs | 1b       | 8192   | 2     | frozen |         |        | 1.0682 ± 0.0005× |        | 1.1667 ± 0.0003× |         |
    call      | 124m     | 512    | 64    | frozen |         |        | 1.092 to 1.116×  |        | 1.200 to 1.244×  |         |
    call      | 124m     | 1024   | 64    | frozen |         |        | 1.092 to 1.116×  |        | 1.200 to 1.244×  |         |
    call      | 124m     | 2048   | 64    | frozen |         |        | 1.092 to 1.116×  |        | 1.200 to 1.244×  |         |
    call      | 124m     | 4096   | 64    | frozen |         |        | 1.100×           |        | 1.229×           |         |
    call      | 124m     | 8192   | 64    | frozen |         |        | 1.100×           |        | 1.221×           |         |
    call      | 124m     | 16384  | 64    | frozen |         |        | 1.092×           |        | 1.200×           |         |
    call      | 124m     | 4096   | 32    | frozen |         |        | 1.0847 ± 0.0024× |        | plotted          |         |
    call      | 124m     | 4096   | 32    | pruned |         |        | 1.1636 ± 0.0012× |        |                  |         |
    call      | 124m     | 4096   | 16    | frozen |         |        | plotted          |        | plotted          |         |
    call      | 124m     | 4096   | 8     | frozen |         |        | plotted          |        | plotted          |         |
    call      | 124m     | 4096   | 4     | frozen |         |        | plotted          |        | plotted          |         |
    call      | 124m     | 4096   | 2     | frozen |         |        | plotted          |        | plotted          |         |
    call      | 124m     | 4096   | 1     | frozen |         |        | 0.969×           |        | 0.972×           |         |
    call      | 124m     | 16384  | 1     | frozen |         |        | 1.08×            |        |                  |         | 1.33×
    call      | 774m     | 8192   | 1     | frozen |         |        | 1.07×            |        |                  |         | 1.31×
    call      | 774m     | 16384  | 1     | frozen |         |        | 1.08×            |        |                  |         | 1.36×
    graph     | 124m     | 4096   | 1     | frozen |         |        | 1.113×           |        | 1.220×           | 1.377×  |
    call      | qwen3-4b | 2048   | 4     | frozen | 1.011×  | 1.028× |                  | 1.068× | 1.135×           | 1.225×  |
    call      | qwen3-4b | 4096   | 4     | frozen | 1.027×  | 1.057× |                  | 1.097× | 1.156×           | 1.246×  |
    call      | qwen3-4b | 8192   | 4     | frozen | 1.042×  | 1.072× |                  | 1.115× | 1.184×           | 1.250×  |
    call      | qwen3-4b | 2048   | 8     | frozen | 1.015×  | 1.042× |                  | 1.079× | 1.148×           | 1.231×  |
    call      | qwen3-4b | 4096   | 8     | frozen | 1.029×  | 1.061× |                  | 1.080× | 1.156×           | 1.252×  |
    call      | qwen3-4b | 8192   | 8     | frozen | 1.040×  | 1.071× |                  | 1.110× | 1.178×           | 1.272×  |
    attention | qwen3-4b | 2048   | 4     | frozen | 1.16×   | 1.18×  |                  | 1.21×  | 1.29×            | 1.38×   |
    attention | qwen3-4b | 4096   | 4     | frozen | 1.16×   | 1.19×  |                  | 1.23×  | 1.28×            | 1.38×   |
    attention | qwen3-4b | 8192   | 4     | frozen | 1.15×   | 1.19×  |                  | 1.23×  | 1.30×            | 1.37×   |
    attention | qwen3-4b | 2048   | 8     | frozen | 1.15×   | 1.17×  |                  | 1.21×  | 1.28×            | 1.37×   |
    attention | qwen3-4b | 4096   | 8     | frozen | 1.15×   | 1.19×  |                  | 1.18×  | 1.27×            | 1.37×   |
    attention | qwen3-4b | 8192   | 8     | frozen | 1.15×   | 1.18×  |                  | 1.22×  | 1.30×            | 1.40×   |
""")  # noqa: E501
"""Speedups of updates, whatever their number of micro-batches, of prompts called or replayed, of attention alone."""
MEMORY = _by_point("""
    of     | model | length | batch | heads  | 0         | 0.1       | 0.25   | 0.5    | 0.75
    update | 124m  | 4096   | 8     | frozen | 32.21 GiB | 31.85 GiB | −1.96% | −3.04% | 30.84 GiB
    update | 124m  | 8192   | 4     | frozen |           |           | −1.63% | −2.55% |
    update | 124m  | 16384  | 2     | frozen |           |           | −0.82% | −1.57% |
    update | 124m  | 4096   | 20    | frozen |           |           | −2.15% | −3.34% |
    update | 124m  | 4096   | 20    | pruned |           |           | −2.19% | −4.22% |
    update | 124m  | 8192   | 10    | frozen |           |           | −2.24% | −3.27% |
    update | 124m  | 8192   | 10    | pruned |           |           | −2.88% | −4.95% |
    update | 124m  | 16384  | 5     | frozen |           |           | −1.76% | −2.82% |
    update | 124m  | 16384  | 5     | pruned |           |           | −5.08% | −7.64% |
    update | 1b    | 8192   | 1     | frozen |           |           | −0.57% | −2.31% |
    update | 1b    | 8192   | 2     | frozen |           |           | −1.83% | −3.99% |
""")
"""Peak memory of an update: its change against ordinary attention, or the peak itself."""
TIMES = _by_point("""
    of     | model | length | batch | heads  | 0.25            | 0.5
    update | 124m  | 4096   | 20    | frozen | 2172.80/2057.35 | 2173.12/1929.10
    update | 124m  | 4096   | 20    | pruned | 2172.80/1923.26 | 2173.12/1678.24
    update | 124m  | 8192   | 10    | frozen | 2651.80/2573.68 | 2652.83/2408.64
    update | 124m  | 8192   | 10    | pruned | 2651.80/2307.18 | 2652.83/1933.85
    update | 124m  | 16384  | 5     | frozen | 3714.63/3621.11 | 3716.74/3419.69
    update | 124m  | 16384  | 5     | pruned | 3714.63/3083.03 | 3716.74/2472.20
""")
"""Milliseconds of ordinary updates and of updates with fewer heads, at the largest batches."""
# The paper prints these times; its speedups are their ratios.
for _point, _rates in TIMES.items():
    _pairs = {rate: map(float, text.split("/")) for rate, text in _rates.items()}
    SPEEDS[_point] = {rate: f"{ordinary / edited:.3f}×" for rate, (ordinary, edited) in _pairs.items()}

FINETUNING_UPDATES = {
    (line["task"], float(line["rate"])): line
    for line in lines("""
        task    | rate | ordinary      | update        | speedup       | memory
        sst2    | 0.25 | 50.11 ± 0.61  | 58.22 ± 9.58  | 0.901 ± 0.122 | −3.65
        sst2    | 0.5  | 50.11 ± 0.61  | 56.70 ± 9.43  | 0.925 ± 0.123 | −5.95
        boolq   | 0.25 | 67.36 ± 0.51  | 70.91 ± 7.25  | 0.967 ± 0.083 | −4.63
        boolq   | 0.5  | 67.36 ± 0.51  | 69.35 ± 7.61  | 0.992 ± 0.093 | −7.19
        quality | 0.25 | 578.72 ± 2.16 | 552.90 ± 0.90 | 1.047 ± 0.005 | −2.12
        quality | 0.5  | 578.72 ± 2.16 | 517.88 ± 3.71 | 1.118 ± 0.010 | −3.92
    """)
}
"""Milliseconds of an update, ordinary and with frozen heads, their ratio, and the change of peak memory, %."""
INTERVENTION = {
    (line["model"], int(line["length"]), float(line["rate"]), int(line["sequences"])): line["total"]
    for line in lines("""
        model | length | rate | sequences | total
        124m  | 4096   | 0.25 | 32        | 54.86 ± 6.04 s
        124m  | 4096   | 0.5  | 32        | 46.30 ± 1.22 s
        1b    | 8192   | 0.25 | 16        | 1464.41 s
        1b    | 8192   | 0.5  | 16        | 1392.64 s
    """)
}
"""Seconds of freezing by model, tokens of context, rate and calibration sequences."""

# --- analyses and errors

GRADIENT_ERRORS = {
    "output": ("1.19e-7", "1.86e-7", "3.91e-3", "2.80e-3"),
    "input": ("3.58e-7", "2.51e-7", "7.81e-3", "3.68e-3"),
    "value": ("3.58e-7", "1.78e-7", "7.81e-3", "1.46e-3"),
    "query projection": ("8.34e-7", "2.82e-7", "1.56e-2", "4.53e-3"),
    "key projection": ("1.19e-6", "3.01e-7", "1.56e-2", "4.43e-3"),
    "value projection": ("3.81e-6", "2.30e-7", "6.25e-2", "2.05e-3"),
    "output projection": ("3.81e-6", "1.97e-7", "6.25e-2", "2.68e-3"),
}
"""Largest absolute and relative L2 error in fp32, then both under bf16 autocast."""
PRUNED_ERRORS = {"fp32": "7.48e-7", "bf16": "4.45e-3"}
"""Largest relative L2 error of the same seven tensors where the heads are pruned, bf16 under autocast."""
SELECTOR_DIAGNOSTIC = {
    "variance": ("0.723", "0.058%", "0.115%"),
    "residual_cosine": ("0.810", "0.033%", "0.121%"),
    "relative_output_change": ("0.703", "0.052%", "0.150%"),
    "output_magnitude": ("0.654", "0.166%", "0.129%"),
    "redundancy": ("−0.013", "0.320%", "0.367%"),
}
"""Spearman, mean cost of the lowest 25% and 50%."""
PARTIAL = {"spearman": "0.723", "layer": "0.733", "layer_entropy": "0.543", "with_entropy": "−0.798"}
"""Of variance with the cost of single heads."""
PROFILES = {"entropy": ("0.837", "0.678"), "local_mass": ("0.190", "0.407"), "first_token": ("0.00023", None)}
"""Selected heads, unselected heads of the same layers."""
IN_FIRST_LAYERS = "21 to 24 of 36"
"""Selected heads in the first four layers."""
STABILITY = {"overlap": "30 to 31 of 36", "expected": "12.6 to 13.4", "rank_correlation": "0.959 to 0.962"}
"""A quarter and half through training."""
RECOVERIES = {"25%": ("2.72%", "0.0061", "0.0062"), "75%": (None, "0.0123", "0.0086"), "100%": ("7.99%", None, None)}
"""Perplexity at once, and the gap in nats 200 updates later and at the end, by the share of training before it."""
JOINT_COST = {"residual_cosine": "+4.136%", "variance": "+5.092%", "overlap": "23 of 36"}
ROW_DISTANCES = {"resampled": "1.10", "gaussian": "1.44", "dirichlet": "2.58"}
"""Median normalised energy distance of generated rows from measured ones."""
QWEN_ARMS = ("ordinary", *(f"{score} {rate}" for score in ("variance", "forward_kl") for rate in (0.1, 0.2, 0.3)))
QWEN_NUMBERS = lines(
    """
    of                  | path                     | places | ordinary | variance 0.1 | variance 0.2 | variance 0.3
    hellaswag, %        | tasks/hellaswag/accuracy | 2      | 52.28    | 52.02        | 51.21        | 48.92
    piqa, %             | tasks/piqa/accuracy      | 2      | 74.86    | 75.19        | 74.48        | 73.56
    arc_easy, %         | tasks/arc_easy/accuracy  | 2      | 80.43    | 79.63        | 77.61        | 75.72
    sst2, %             | tasks/sst2/accuracy      | 2      | 88.65    | 88.65        | 87.96        | 85.44
    boolq, %            | tasks/boolq/accuracy     | 2      | 84.46    | 83.33        | 80.49        | 73.12
    mean change, points | mean_difference          | 2      |          | −0.37        | −1.79        | −4.79
    heads, first third  | layer_thirds/0           | 0      |          | 37           |              |
    heads, second third | layer_thirds/1           | 0      |          | 31           |              |
    heads, last third   | layer_thirds/2           | 0      |          | 47           |              |
    median forward KL   | forward_kl_median        | 3      |          | 0.578        |              |
    median fit KL       | fit_kl_median            | 3      |          |              |              | 0.027
    sst2, negative      | tasks/sst2/taken/0       | 0      | 479      |              |              |
    sst2, positive      | tasks/sst2/taken/1       | 0      | 393      |              |              |
    """,
    """
    forward_kl 0.1 | forward_kl 0.2 | forward_kl 0.3
    49.10          | 45.05          | 43.81
    74.70          | 72.58          | 70.40
    72.90          | 68.06          | 64.10
    87.61          | 63.07          | 68.81
    80.03          | 71.38          | 71.38
    −3.27          | −12.11         | −12.44
    50             |                |
    18             |                |
    47             |                |
    0.296          |                |
                   |                | 0.029
                   | 721            | 580
                   | 151            | 292
    """,
)
"""Of Qwen3-4B as it was and with heads frozen by a score at a rate; KL in nats, medians over the chosen heads.

At which rate the paper took the median of the fits it does not say; the largest set holds the others.
"""
QWEN_OVERLAP = {0.1: "31%", 0.3: "43%"}
"""Heads chosen by both scores, by rate."""
STORAGE = {"dense_by_layer": "8.060 GB", "dense_packed": "2.416 GB", "allocated": "0.133 GB"}
"""Of the patterns of 36 heads in 10 layers over 4,096 tokens."""
GEOMETRY_CORRELATIONS = {
    "squared_error": {"0.1": "0.900", "0.25": "1.000", "0.5": "1.000", "0.75": "0.900", "stratified": "0.950"},
    "kl": {"0.1": "0.600", "0.25": "0.600", "0.5": "0.600", "0.75": "0.700", "stratified": "0.625"},
    "hellinger": {"0.1": "0.800", "0.25": "0.900", "0.5": "0.900", "0.75": "1.000", "stratified": "0.900"},
    "total_variation": {"0.1": "0.800", "0.25": "0.900", "0.5": "0.900", "0.75": "1.000", "stratified": "0.900"},
}
