"""Small files of the zero-shot tasks in their public layouts, and the prompts that lm-eval makes of them."""

import json
from pathlib import Path

COUNT = 6
"""Questions of each task."""
COLOURS = ("red", "green", "blue", "grey", "black")


def write_tasks(folder: Path) -> Path:
    """Write every task's file, `COUNT` questions each, and return the folder."""
    lines: dict[str, list[str]] = {}
    for n in range(COUNT):
        words = [COLOURS[(n + k) % 5] for k in range(5)]
        ended = {"ctx": f"We see a {words[0]} dog. the dog", "activity_label": "Walking"}
        how = {"ctx": f"How to paint {words[1]}.", "activity_label": "Art"}
        asked = how if n % 2 else ended
        lines.setdefault("hellaswag/hellaswag_val.jsonl", []).append(
            json.dumps({**asked, "endings": [f"is {word}." for word in words[:4]], "label": n % 4})
        )
        two = {"goal": f"paint {words[0]}", "sol1": f"use {words[1]} ", "sol2": f"take {words[2]} and wait"}
        lines.setdefault("piqa/valid.jsonl", []).append(json.dumps(two))
        lines.setdefault("piqa/valid-labels.lst", []).append(str(n % 2))
        labels = "1234" if n % 2 else "ABCDE"
        choices = [{"text": words[k], "label": label} for k, label in enumerate(labels)]
        question = {"stem": f"Which is {words[0]}?", "choices": choices}
        lines.setdefault("arc_easy/ARC-Easy-Dev.jsonl", []).append(
            json.dumps({"id": f"q{n}", "question": question, "answerKey": labels[n % 4]})
        )
        lines.setdefault("sst2/dev.tsv", ["sentence\tlabel"]).append(f"a {words[0]} film \t{n % 2}")
        passage = {"question": f"is it {words[0]}", "passage": f"It -- it is {words[n % 2]}.", "label": n % 2 == 0}
        lines.setdefault("boolq/val.jsonl", []).append(json.dumps(passage))
    for name, rows in lines.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(rows) + "\n")
    return folder


def expected(name: str, n: int) -> tuple[str, list[str], int]:
    """Return the context, the choices without the space before them, and the right one's number of question `n`."""
    words = [COLOURS[(n + k) % 5] for k in range(5)]
    if name == "hellaswag":
        context = f"Art: How to paint {words[1]}." if n % 2 else f"Walking: We see a {words[0]} dog. The dog"
        return context, [f"is {word}." for word in words[:4]], n % 4
    if name == "piqa":
        return f"Question: paint {words[0]}\nAnswer:", [f"use {words[1]} ", f"take {words[2]} and wait"], n % 2
    if name == "arc_easy":
        return f"Question: Which is {words[0]}?\nAnswer:", words[: 4 if n % 2 else 5], n % 4
    if name == "sst2":
        question = "Question: Is this sentence positive or negative?"
        return f"a {words[0]} film \n{question}\nAnswer:", ["negative", "positive"], n % 2
    return f"It -- it is {words[n % 2]}.\nQuestion: is it {words[0]}?\nAnswer:", ["no", "yes"], int(n % 2 == 0)
