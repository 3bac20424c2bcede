"""A tokenising process. Run by its path, not imported: it must start without importing `saf` or torch.

Requests on stdin: `<I` number of texts, `<Q` size of each in bytes, then the UTF-8 texts. Answers on stdout:
`<Q` number of tokens of each text, then all token ids as `<u4`. The end of stdin ends it.
"""

import signal
import sys

import numpy as np
from tokenizers import Tokenizer


def main(tokenizer_file: str):
    """Answer requests until stdin ends."""
    # Ctrl-C reaches the whole process group; the parent decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tokenizer = Tokenizer.from_file(tokenizer_file)
    tokenizer.encode_special_tokens = True
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    while header := stdin.read(4):
        sizes = np.frombuffer(stdin.read(8 * int.from_bytes(header, "little")), dtype="<u8")
        texts = [stdin.read(int(size)).decode("utf-8") for size in sizes]
        rows = [row.ids for row in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        stdout.write(np.array([len(row) for row in rows], dtype="<u8").tobytes())
        for row in rows:
            stdout.write(np.array(row, dtype="<u4").tobytes())
        stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
