"""Hash what the code computes, to show that a change moved no number: `python tools/parity.py --base COMMIT`.

It computes on CUDA where there is a device, and on the CPU with `--device cpu`; hashes of two kinds of device differ.
It hashes a training run of fixed seed across a freezing event and cases of the operators, the calibration, the fit and
models of transformers. It calls public names and commands alone, so that it runs at commits whose insides differ. On a
CPU one thread is used: sums then have one order. SDPA's `math` kernel has no atomic additions.
"""

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when PyTorch loads
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import saf
from saf.cli import main as main_of_saf

ROOT = Path(__file__).resolve().parents[1]
LENGTH = 160
VOCABULARY = 512
SIZES = {"num_layers": 3, "vocab_size": 256, "max_length": LENGTH}


def digest(*parts: object) -> str:
    """Return the first 16 hexadecimal digits of a SHA-256 over tensors (their bytes) and other values (their JSON)."""
    hasher = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            plain = part.detach().cpu().contiguous()
            hasher.update(f"{plain.dtype}{list(plain.shape)}".encode())
            # As bytes: NumPy has no bfloat16.
            hasher.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            hasher.update(json.dumps(part, sort_keys=True).encode())
    return hasher.hexdigest()[:16]


def command(*words: str) -> None:
    """Run one `saf` command; exit with its output when it fails."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        code = main_of_saf(words)
    if code:
        sys.exit(f"{shown.getvalue()}\nsaf {' '.join(words)} failed")


def prepare(root: Path) -> Path:
    """Prepare a data folder of invented words."""
    text, out = root / "text.jsonl", root / "data"
    # Computed, not drawn: a generator's numbers may change between versions.
    lines = (" ".join(f"{(7 * line * word) % 997:x}" for word in range(1, 200)) for line in range(1, 400))
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    command("data", "prepare", str(text), "--out", str(out), "--vocab-size", str(VOCABULARY))
    return out


def training(device: str) -> Iterator[tuple[str, str]]:
    """Train 20 updates across a freezing event, fixed and trainable patterns, and a branch of the ordinary arm."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shape = ("--model", "tiny", "--model-overrides", "vocab_size", str(VOCABULARY), "--length", "128")
        updates = ("--updates", "20", "--batch-size", "4", "--accumulation", "2")
        small = ("--calibration-sequences", "8", "--eval-windows", "4", "--eval-every", "5", "--quiet")
        where = ("--device", device, "--precision", "fp32", "--compile", "off", "--kernel", "math")
        common = ("--data", str(prepare(root)), *shape, *updates, *small, *where)
        arms = {
            "ordinary": (),
            "frozen": ("--freeze.rate", "0.25"),
            "trainable": ("--freeze.rate", "0.25", "--freeze.trainable"),
        }
        for name, more in arms.items():
            command("pretrain", "--out", str(root / name), *common, *more)
            yield f"training: {name}", run_digest(root / name)
        parent = root / "ordinary" / "checkpoints" / "step-10"
        command("pretrain", "--parent", str(parent), "--out", str(root / "branch"), "--freeze.rate", "0.25")
        yield "training: branch", run_digest(root / "branch")


def run_digest(folder: Path) -> str:
    """Hash every update's loss, rate and gradient norm, the frozen heads, the final weights and the report."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [[line[name] for name in ("update", "loss", "lr", "grad_norm")] for line in lines]
    result = json.loads((folder / "result.json").read_text())
    model = saf.load(folder)
    state = numbers(model)
    tensors = [state[name] for name in sorted(state)]
    return digest(metrics, sorted(state), result["provenance"]["heads"], result["report_loss"], *tensors)


def numbers(model: "saf.GPT") -> dict[str, Tensor]:
    """Return the state dict without the record of which heads are frozen."""
    return {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("frozen_layout")}


def drawn(shape: tuple[int, ...], seed: int, device: str, dtype: torch.dtype) -> Tensor:
    """Return normal numbers, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def pattern(heads: int, seed: int) -> "saf.CompactPattern":
    """Return compact patterns that fall with distance and have a first key that stands out."""
    alpha = 0.3 * drawn((heads, LENGTH), seed, "cpu", torch.float64)
    alpha[:, 0] += 2
    rho = 0.2 * drawn((heads, LENGTH), seed + 1, "cpu", torch.float64) - torch.arange(LENGTH) / 40
    return saf.CompactPattern.from_parameters(alpha, rho)


def operators(device: str) -> Iterator[tuple[str, str]]:
    """Hash outputs and gradients of mixed and frozen attention, by backend, dtype, grouping and length."""
    dtypes, backends = [torch.float32, torch.bfloat16], ["reference", "toeplitz"]
    if device == "cpu":
        dtypes.append(torch.float64)
    else:
        backends.append("fused")
    for backend, dtype, grouped in itertools.product(backends, dtypes, (False, True)):
        name = f"{backend} {str(dtype).removeprefix('torch.')}{' grouped' if grouped else ''}"
        kv_head = (0, 0, 1, 1) if grouped else (0, 1, 2, 3)
        prepared = {"backend": backend, "dtype": dtype, "device": device, "kv_head": kv_head}
        frozen = saf.FrozenHeads.from_patterns(pattern(2, 3), **prepared)
        for length in (129, 64, 1):
            shapes = [(2, count, length, 16) for count in (2, len(set(kv_head)) // 2, len(set(kv_head)))]
            heads = [drawn(shape, seed, device, dtype).requires_grad_() for seed, shape in enumerate(shapes)]
            for case, value in operator_cases(heads, frozen, backend, device):
                if not (grouped and case == "frozen"):
                    yield f"{case} {name} T={length}", value


def operator_cases(
    heads: list[Tensor], frozen: "saf.FrozenHeads", backend: str, device: str
) -> Iterator[tuple[str, str]]:
    """Hash one backend with gradients, without, for frozen heads alone, padded, and for few rows."""
    query, key, value = heads
    kernel = "auto" if backend == "fused" else "math"
    output = saf.mixed_attention(query, key, value, frozen, kernel=kernel)
    results: list[Tensor | None] = [output]
    if backend != "fused":
        output.backward(drawn(tuple(output.shape), 9, device, output.dtype))
        results += [tensor.grad for tensor in heads]
    yield "mixed", digest(*results)
    with torch.no_grad():
        yield "inference", digest(saf.mixed_attention(query, key, value, frozen))
    yield "frozen", digest(saf.frozen_attention(value.detach(), frozen))
    if backend != "fused" and query.shape[2] > 1:
        start = torch.tensor([0, 5], device=device)
        padded = saf.mixed_attention(query, key, value, frozen, left_pad=start, kernel=kernel)
        few = saf.mixed_attention(query[:, :, -3:], key, value, frozen, kernel=kernel)
        yield "padded and few", digest(padded, few)


def models(device: str) -> Iterator[tuple[str, str]]:
    """Hash calibration, scores, fits, freezing and undo of a small decoder, and of a Llama where it can be imported."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 256, (6, LENGTH), generator=generator)

    def decoder() -> "saf.GPT":
        model = saf.GPT(saf.preset("tiny", **SIZES))
        model.reset_parameters(torch.Generator().manual_seed(5))
        return model.to(device)

    batches = [tokens[:3].to(device), tokens[3:].to(device)]
    statistics = saf.calibrate(decoder(), batches)
    yield "statistics", digest(*(getattr(statistics, n) for n in ("variance", "forward_kl", "eta_abs", "eta_rel")))
    yield "scores", digest(*(saf.score(statistics, name) for name in ("variance", "forward_kl")))
    for fitter in ("proportional", "adam"):
        fitted = saf.fit_compact(statistics.eta_abs[0], statistics.eta_rel[0], fitter=fitter)
        yield f"fit {fitter}", digest(fitted.alpha, fitted.rho, fitted.log_z)
    for name in ("mean", "sharp_mean", "gaussian", "dirichlet", "structured_random"):
        model = decoder()
        gate = {} if name == "structured_random" else {"max_fit_kl": 9.0}  # drawn compact, nothing is fitted
        saf.freeze_(model, batches, saf.FreezeConfig(rate=0.5, pattern=name, **gate))
        with torch.no_grad():
            yield f"freeze_ {name}", digest(model(tokens.to(device)), *numbers(model).values())
        saf.uninstall_(model)
        yield f"undo {name}", digest(*numbers(model).values())
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, num_key_value_heads=2, **sizes)
    llama = LlamaForCausalLM(config).eval()
    # transformers draws weights from the global generator, in an order of its own.
    for index, weight in enumerate(llama.parameters()):
        weight.data = 0.1 * drawn(tuple(weight.shape), 100 + index, "cpu", torch.float32)
    llama.to(device)
    saf.freeze_(llama, batches, saf.FreezeConfig(rate=0.5, max_fit_kl=9.0))
    with torch.no_grad():
        yield "llama logits", digest(llama(tokens.to(device)).logits)
        generated = llama.generate(tokens[:2, :20].to(device), max_new_tokens=20, do_sample=False, pad_token_id=0)
    yield "llama generate", digest(generated)


def hashes_at(commit: str, device: str) -> dict[str, str]:
    """Return the hashes of a commit of this repository, by this file in a work tree of its own."""
    with tempfile.TemporaryDirectory() as folder:
        tree, out = Path(folder, "tree"), Path(folder, "hashes.json")
        git = ("git", "-C", str(ROOT), "worktree")
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            script = shutil.copy(__file__, tree / "tools" / "parity.py")  # the commit's own may hash other things
            words = [sys.executable, script, "--device", device, "--out", str(out)]
            # The commit's own packages come first; the caller's path behind them may hold what both need.
            path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
            done = subprocess.run(
                words, cwd=tree, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
            )
            if done.returncode:
                sys.exit(f"{done.stdout}{done.stderr}\nno hashes of {commit}: its run failed")
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
        return json.loads(out.read_text())


def main() -> int:
    """Print a line a case, and return 1 when a hash differs from the other commit's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda, else cpu")
    parser.add_argument("--out", type=Path, help="write the hashes to this JSON file")
    parser.add_argument("--base", help="compare with this commit")
    arguments = parser.parse_args()
    device = ("cuda" if torch.cuda.is_available() else "cpu") if arguments.device == "auto" else arguments.device
    print(f"on {device}", flush=True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # a warning where an operator has no such form
    hashes: dict[str, str] = {}
    for part in (operators, models, training):
        for name, value in part(device):
            hashes[name] = value
            print(f"{value}  {name}", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(hashes, indent=1) + "\n")
    if not arguments.base:
        return 0
    expected = hashes_at(arguments.base, device)
    moved = [name for name in sorted(expected.keys() | hashes.keys()) if expected.get(name) != hashes.get(name)]
    print(f"{len(hashes)} hashes, {len(moved)} differ" + "".join(f"\n  {name}" for name in moved))
    return 1 if moved else 0


if __name__ == "__main__":
    sys.exit(main())
