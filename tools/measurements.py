"""What `tools/measure.py` measures: a command for each record of `results/bench`, and how a rehearsal shrinks it."""

from typing import NamedTuple

QUARTERS = "--rates 0.25 0.5 --others --backends toeplitz"
PAIRED = f"{QUARTERS} --precompile --workers 8 --no-profile"
SHORT = f"{PAIRED} --no-free --kernels auto --settle-ms 100 --pairs 6"
RATES = "--rates 0.1 0.25 0.5 0.75 --others --backends toeplitz --no-free --precompile --workers 6 --no-profile"
PEAKS = "--backends toeplitz --others --no-free --memory --pairs 0 --no-profile"
FINETUNE = "saf bench finetune --tokenizer {tokenizer}"
EAGER = "saf bench prefill --model qwen3-4b --precisions bf16 --compile off"
QWEN = f"{EAGER} --backends toeplitz --settle-ms 100 --no-profile"
QWEN_RATES = "--rates 0.1 0.3 0.5 0.75 --others flash --pairs 4"
QWEN_FLASH = "--kernels flash --rates 0.1 0.3 0.5 0.75 --others --pairs 3"
# Of eight prompts the first pairs are of a device that is not warm yet.
QWEN_FLASH_LONG = QWEN_FLASH.replace("--pairs 3", "--pairs 5")
QWEN_OP = (
    "saf bench op --shape qwen3-4b --parts layer --directions forward --graphs off --backends toeplitz --pairs 4"
    " --no-profile"
)
QWEN_SECONDS = (("2048x4", 60), ("2048x8", 70), ("4096x4", 75), ("4096x8", 95), ("8192x4", 100), ("8192x8", 160))
ATTENTION = "saf bench attention --model qwen3-4b --backends toeplitz --rates 0.1 0.2 0.3 0.5 0.75 --settle-ms 100"
QWEN_POINTS = "2048x4 2048x8 4096x4 4096x8 8192x4 8192x8"
QWEN_LAYER = f"{QWEN_OP} --points {QWEN_POINTS}"
DECODE = "saf bench decode --graphs on --rates 0.25 0.5 --others --no-free --precompile --pairs 5 --no-profile"
# "auto" is what a user gets; "split" gives ordinary heads the launch that frozen ones take.
OWN = f"{DECODE} --kernels auto --workers 6"
SPLIT = f"{DECODE} --kernels split --workers 6"
QWEN_STEP = f"{OWN} --model qwen3-4b --num-layers 12"
ONE_B = "saf bench update --model 1b --points 8192x1x2 8192x2x1 --compile layers"
EVENTS = "python tools/compare_compile.py --only events --forms layers --ahead"
GROUP = "torchrun --standalone --nproc-per-node 1 -m saf bench update"


class Entry(NamedTuple):
    """Hold one measurement: the seconds that it is foretold to take, and its command without `--out`."""

    seconds: int
    command: str


ENTRIES = {
    # What no table has yet: first one of each kind of measurement.
    "event-124m": Entry(130, EVENTS),
    "nccl-124m": Entry(
        125,
        f"{GROUP} --parallel ddp --points 4096x8x4 --rates 0.25 --others --backends toeplitz --no-free --pairs 8"
        " --repeats 1 --no-profile",
    ),
    "finetune-sst2": Entry(
        150,
        f"{FINETUNE} --task sst2 --data {{tasks}}/sst2/train.tsv.gz --test {{tasks}}/sst2/dev.tsv {QUARTERS} --pairs 6"
        " --graphs both",
    ),
    "finetune-boolq": Entry(
        170,
        f"{FINETUNE} --task boolq --data {{tasks}}/boolq/train.jsonl.gz --test {{tasks}}/boolq/val.jsonl.gz {QUARTERS}"
        " --pairs 6 --graphs both",
    ),
    "decode-4k": Entry(110, f"{OWN} --points 4096x1"),
    "op-qwen3": Entry(180, f"{QWEN_LAYER} --rates 0.1 0.2 0.3 0.5 0.75 --others flash"),
    "prefill-qwen3-flash": Entry(80, f"{QWEN} --points 2048x4 {QWEN_FLASH}"),
    "prefill-qwen3-flash-8k": Entry(150, f"{QWEN} --points 8192x4 {QWEN_FLASH}"),
    "prefill-qwen3-flash-2048x8": Entry(70, f"{QWEN} --points 2048x8 {QWEN_FLASH}"),
    "prefill-qwen3-flash-4096x4": Entry(70, f"{QWEN} --points 4096x4 {QWEN_FLASH}"),
    "prefill-qwen3-flash-4096x8": Entry(140, f"{QWEN} --points 4096x8 {QWEN_FLASH_LONG}"),
    "prefill-qwen3-flash-8192x8": Entry(280, f"{QWEN} --points 8192x8 {QWEN_FLASH_LONG}"),
    "prefill-qwen3-4096x4": Entry(70, f"{QWEN} --points 4096x4 {QWEN_RATES.replace('--pairs 4', '--pairs 6')}"),
    # One rate, so that its models fit into 80 GB; below 1% pairs have to be many.
    "prefill-qwen3-10": Entry(
        60, f"{QWEN} --points 4096x4 {QWEN_RATES.replace('0.1 0.3 0.5 0.75', '0.1').replace('--pairs 4', '--pairs 10')}"
    ),
    # Six models at a time, for devices of 80 GB.
    **{
        f"prefill-qwen3-{point}-{name}": Entry(seconds, f"{QWEN} --points {point} --rates {rates} --others --pairs 4")
        for point, seconds in (("2048x4", 40), ("4096x4", 50), ("8192x4", 65))
        for name, rates in (("half", "0.3 0.5"), ("ends", "0.1 0.75"))
    },
    "update-b2": Entry(135, f"saf bench update --points 4096x2x8 --pairs 6 --repeats 1 {RATES}"),
    # Two sequences of 4K leave the device waiting for the host; a graph a micro-batch does not.
    "update-b2-graphs": Entry(
        280,
        "saf bench update --points 4096x2x8 --graphs both --pairs 6 --repeats 1 --rates 0.25 0.5 --others"
        " --backends toeplitz --no-free --precompile --workers 6 --no-profile",
    ),
    "update-b4-graphs": Entry(
        280,
        "saf bench update --points 4096x4x8 --graphs both --pairs 5 --repeats 1 --rates 0.25 0.5 --others"
        " --backends toeplitz --no-free --precompile --workers 6 --no-profile",
    ),
    "decode-64k": Entry(130, f"{OWN} --points 65536x8"),
    "finetune-quality": Entry(
        110,
        f"{FINETUNE} --task quality --data {{tasks}}/quality/quality.htmlstripped.jsonl.gz"
        f" --test {{tasks}}/quality/quality.htmlstripped.jsonl.gz {QUARTERS} --length 16384 --max-tokens 16384"
        " --repeats 1 --pairs 4 --no-free",
    ),
    "decode-4k-8": Entry(110, f"{OWN} --points 4096x8"),
    "checkpointing-1b": Entry(
        150,
        "saf bench update --model 1b --points 8192x2x1 --compile layers --activation-checkpointing --pairs 4"
        " --repeats 1 --rates 0.25 --others --backends toeplitz --no-free --no-profile",
    ),
    "op-qwen3-groups": Entry(85, f"{QWEN_LAYER} --rates 0.25 0.5 0.75 --others --no-free --whole-groups"),
    "decode-qwen3-groups": Entry(120, f"{QWEN_STEP} --points 4096x8 --placement groups"),
    "decode-qwen3-groups-64k": Entry(120, f"{QWEN_STEP} --points 65536x1 --placement groups"),
    "memory-qwen3": Entry(200, f"{EAGER} --points 8192x4 8192x8 --rates 0.1 0.3 0.5 0.75 {PEAKS} --workers 4"),
    "memory-qwen3-short": Entry(
        190, f"{EAGER} --points 2048x4 2048x8 4096x4 4096x8 --rates 0.1 0.3 0.5 0.75 {PEAKS} --workers 4"
    ),
    "prefill-4096x8": Entry(90, f"saf bench prefill --points 4096x8 --pairs 5 {PAIRED}"),
    "update-1b": Entry(
        240, f"{ONE_B} --pairs 4 --repeats 1 --rates 0.25 0.5 --others --backends toeplitz --no-free --no-profile"
    ),
    "memory-1b": Entry(180, f"{ONE_B} --rates 0.25 0.5 {PEAKS} --workers 2"),
    "decode-qwen3": Entry(120, f"{QWEN_STEP} --points 4096x8"),
    "decode-qwen3-64k": Entry(120, f"{QWEN_STEP} --points 65536x1"),
    "decode-qwen3-groups-64k-split": Entry(
        120, f"{SPLIT} --model qwen3-4b --num-layers 12 --points 65536x1 --placement groups"
    ),
    "decode-4k-split": Entry(110, f"{SPLIT} --points 4096x1"),
    "decode-64k-split": Entry(130, f"{SPLIT} --points 65536x8"),
    "update-rates": Entry(
        150, f"saf bench update --points 4096x8x4 --pairs 6 --repeats 1 --pruned {RATES.replace('0.25 0.5 ', '')}"
    ),
    "compile-124m": Entry(270, "python tools/compare_compile.py --only pairs"),
    "compile-1b": Entry(330, "python tools/compare_compile.py --only pairs --model 1b --points 8192x1x2 --pairs 6"),
    # The first updates of so many tokens scatter: equal models differ by 2% over four pairs of one update.
    "update-native": Entry(
        250, f"saf bench update --points 4096x20x2 --warmup 4 --pairs 8 --repeats 2 --no-free --pruned {PAIRED}"
    ),
    "prefill-pruned": Entry(
        110,
        "saf bench prefill --points 4096x32 --rates 0.25 --others --backends toeplitz --pruned --no-free"
        " --pairs 4 --precompile --workers 8 --no-profile",
    ),
    "prefill-pruned-called": Entry(
        90, f"saf bench prefill --points 4096x1 --graphs off --pruned {SHORT.replace('0.25 0.5', '0.25')}"
    ),
    "op-qwen3-flash": Entry(140, f"{QWEN_LAYER} --rates 0.1 0.2 0.3 0.5 0.75 --others --kernels flash"),
    "op-qwen3-8192x8": Entry(
        60,
        # Two layers of the same heads differ by 3% there, pair after pair, whatever the cause (docs/log.md).
        f"{QWEN_OP} --points 8192x8 --rates 0.1 0.2 0.3 0.5 0.75 --others flash --tolerance 0.035",
    ),
    # A layer of few tokens takes the host longer than the device, unless it is replayed.
    "op-qwen3-graphs": Entry(
        150,
        f"{QWEN_OP.replace('--graphs off', '--graphs on')} --points {QWEN_POINTS} --rates 0.1 0.3 0.5 0.75 --others",
    ),
    # The paper's kind of kernel, one for live and frozen heads, against its baseline and against cuDNN.
    "op-qwen3-fused": Entry(
        150,
        f"{QWEN_OP.replace('--graphs off', '--graphs on').replace('--backends toeplitz', '--backends toeplitz fused')}"
        " --points 2048x4 4096x4 8192x4 --rates 0.1 0.3 0.75 --others flash --no-free",
    ),
    # Where prompts of Qwen3-4B spend what frozen heads can save: projections inside, MLPs left out.
    **{
        f"attention-qwen3-{kernel}-{point}": Entry(
            seconds, f"{ATTENTION} --points {point} --kernels {kernel} --others{others} --pairs 6 --no-profile"
        )
        for point, seconds in QWEN_SECONDS
        for kernel, others in (("cudnn", " flash"), ("flash", ""))
    },
    "update-native-long": Entry(
        320, f"saf bench update --points 8192x10x2 16384x5x2 --warmup 3 --pairs 5 --no-free --pruned {PAIRED}"
    ),
    # Programs compiled side by side do not fit beside batches that fill the device.
    "update-native-16k": Entry(
        270,
        f"saf bench update --points 16384x5x2 --warmup 3 --pairs 5 --no-free --pruned {QUARTERS} --no-profile",
    ),
    # With PyTorch's choice of kernel, as users call: heads pinned to one never take the launch of few tokens.
    "prefill-few": Entry(240, f"saf bench prefill --points 4096x2 4096x4 --graphs both {SHORT}"),
    "prefill-by-batch": Entry(150, f"saf bench prefill --points 4096x8 4096x16 --pairs 8 --no-free {PAIRED}"),
    "update-b4": Entry(135, f"saf bench update --points 4096x4x8 --pairs 6 --repeats 1 {RATES}"),
    "prefill-qwen3-groups": Entry(
        90, f"{QWEN} --points 8192x4 --placement groups --rates 0.3 0.5 --others --no-free --pairs 3"
    ),
    "prefill-qwen3-groups-short": Entry(
        80, f"{QWEN} --points 2048x4 4096x4 --placement groups --rates 0.3 0.5 --others --pairs 4"
    ),
    "prefill-4096x32": Entry(100, f"saf bench prefill --points 4096x32 --pairs 5 {PAIRED}"),
    "prefill-4096x16": Entry(95, f"saf bench prefill --points 4096x16 --pairs 5 {PAIRED}"),
    "prefill-qwen3-8192x8": Entry(120, f"{QWEN} --points 8192x8 {QWEN_RATES}"),
    "prefill-qwen3-8192x4": Entry(70, f"{QWEN} --points 8192x4 {QWEN_RATES}"),
    "prefill-qwen3-4096x8": Entry(70, f"{QWEN} --points 4096x8 {QWEN_RATES}"),
    "prefill-qwen3-2048x4": Entry(40, f"{QWEN} --points 2048x4 {QWEN_RATES}"),
    "prefill-qwen3-2048x8": Entry(50, f"{QWEN} --points 2048x8 {QWEN_RATES}"),
    "memory-long": Entry(95, f"saf bench update --points 8192x4x2 16384x2x2 --rates 0.25 0.5 {PEAKS} --workers 3"),
    "prefill-4096x2": Entry(85, f"saf bench prefill --points 4096x2 --pairs 5 {PAIRED}"),
    "prefill-4096x4": Entry(90, f"saf bench prefill --points 4096x4 --pairs 5 {PAIRED}"),
    "event-1b": Entry(260, f"{EVENTS} --model 1b --points 8192x1x2"),
    # What tables have: first what README quotes.
    "update-4k-again": Entry(
        150, f"saf bench update --points 4096x8x4 --pairs 8 --repeats 1 --no-free --pruned {PAIRED}"
    ),
    "update-16k": Entry(165, f"saf bench update --points 16384x2x4 --pairs 7 --repeats 1 --no-free --pruned {PAIRED}"),
    "update-16k-rates": Entry(
        120,
        f"saf bench update --points 16384x2x4 --pairs 6 --repeats 1 --no-free --pruned"
        f" {PAIRED.replace('0.25 0.5', '0.75')}",
    ),
    "update-8k": Entry(150, f"saf bench update --points 8192x4x4 --pairs 6 --repeats 1 --no-free --pruned {PAIRED}"),
    # Calls of few tokens apart, with PyTorch's choice of kernel: pinned heads do not take the launch that calls do.
    "prefill-b1": Entry(110, f"saf bench prefill --points 4096x1 --graphs on --pairs 6 {PAIRED}"),
    "prefill-called": Entry(75, f"saf bench prefill --points 4096x1 --graphs off {SHORT}"),
    "prefill-b64-4k": Entry(110, f"saf bench prefill --points 4096x64 --pairs 5 {PAIRED}"),
    "prefill-b64": Entry(120, f"saf bench prefill --points 8192x64 --pairs 4 {PAIRED}"),
    "prefill-b64-16k": Entry(120, f"saf bench prefill --points 16384x64 --pairs 3 --no-free {PAIRED}"),
    "memory-4k": Entry(50, f"saf bench update --points 4096x8x2 --rates 0.25 0.5 {PEAKS} --workers 3"),
    "memory-4k-layers": Entry(
        80, f"saf bench update --points 4096x8x2 --rates 0.25 {PEAKS} --workers 1 --compile layers"
    ),
    "calibration-124m": Entry(30, "saf bench calibration --dense-layers 4 --statistics {statistics}"),
    "calibration-1b": Entry(40, "saf bench calibration --model 1b --dense-layers 1 --repeats 3"),
    "calibration-long": Entry(
        60, "saf bench calibration --points 16384x8 65536x2 --batch-size 1 --dense-layers 0 --repeats 3"
    ),
    "op-frozen": Entry(
        60,
        "saf bench op --parts frozen --rates 0.25 --backends toeplitz --others --directions both --graphs on --pairs 6"
        " --no-profile",
    ),
    "errors": Entry(40, "saf bench errors --transitions 50"),
    "op-layer": Entry(
        150,
        "saf bench op --parts layer --points 4096x8 16384x2 --rates 0.25 0.5 --backends toeplitz fused --others auto"
        " flash flex --directions forward both --graphs on --pairs 4 --no-profile",
    ),
    "prefill-512-few": Entry(180, f"saf bench prefill --points 512x1 512x4 1024x1 2048x1 --graphs both {SHORT}"),
    "prefill-graphs": Entry(190, f"saf bench prefill --points 2048x2 4096x2 2048x4 1024x4 --graphs on {SHORT}"),
    "prefill-512": Entry(95, f"saf bench prefill --points 512x64 --pairs 5 {PAIRED}"),
    "prefill-1k": Entry(95, f"saf bench prefill --points 1024x64 --pairs 5 {PAIRED}"),
    "prefill-2k": Entry(100, f"saf bench prefill --points 2048x64 --pairs 5 {PAIRED}"),
    "prefill-flash": Entry(
        240, f"saf bench prefill --points 4096x64 8192x64 16384x64 --kernels flash --pairs 4 --no-free {PAIRED}"
    ),
    "prefill-flash-short": Entry(
        200, f"saf bench prefill --points 512x64 1024x64 2048x64 --kernels flash --pairs 4 --no-free {PAIRED}"
    ),
    "prefill-qwen3-2k": Entry(
        95, f"saf bench prefill --model qwen3-4b --num-layers 6 --precisions bf16 --points 2048x4 --pairs 5 {PAIRED}"
    ),
    "prefill-qwen3-8k": Entry(
        115, f"saf bench prefill --model qwen3-4b --num-layers 6 --precisions bf16 --points 8192x4 --pairs 5 {PAIRED}"
    ),
}
"""Every measurement by the name of its record."""

UNLIMITED = "saf bench errors"
"""The one command that takes no limit."""
INPUTS = {
    "tasks": "folder of sst2/, boolq/ and quality/, for the updates of finetuning",
    "tokenizer": "folder of GPT-2's tokenizer, for them",
    "statistics": "file of a real model's statistics, for calibration-124m",
}
"""Files of the user's that commands name in braces, by the flag that gives them."""

_SMALL = "--device cpu --pairs 2 --tolerance 100"
_ONCE = f"{_SMALL} --rates 0.5 --warmup 1 --repeats 1 --no-profile"
_MODEL = f"{_ONCE} --compile off --no-precompile --workers 1 --kernels auto --others"
REHEARSALS = {
    "saf bench update": f"{_MODEL} --model tiny --points 32x2x2",
    "torchrun": f"{_ONCE} --compile off --kernels auto --model tiny --points 32x2x2",
    "saf bench prefill": f"{_MODEL} --model tiny --points 32x1 --graphs off --precisions fp32",
    "saf bench prefill --model qwen3-4b": (
        f"{_MODEL} --model llama-124m --num-layers 1 --points 32x1 --graphs off --precisions fp32"
    ),
    "saf bench attention": f"{_ONCE} --kernels auto --others --model llama-124m --num-layers 1 --points 32x1",
    "saf bench decode": f"{_MODEL} --model llama-124m --num-layers 1 --points 32x1 --graphs off",
    "saf bench finetune": (
        f"{_ONCE} --compile off --kernels auto --num-layers 1 --length 128 --max-tokens 128 --batch-size 2"
        " --accumulation 1 --orders 1 2"
    ),
    "saf bench op": f"{_ONCE} --points 32x1 --num-heads 4 --graphs off --kernels auto --others",
    "saf bench op --shape qwen3-4b": (
        f"{_ONCE} --points 32x1 --num-heads 4 --num-kv-heads 2 --graphs off --kernels auto --others"
    ),
    "saf bench calibration": "--device cpu --model tiny --points 64x4 --repeats 3 --dense-layers 1",
    "saf bench errors": "--device cpu --transitions 2",
    "python": f"{_SMALL} --model tiny --points 32x2x1 --repeats 1",
}
"""What a rehearsal appends to commands, by how they begin, the longest beginning first: the smallest sizes on a CPU."""
