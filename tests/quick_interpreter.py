"""Triton's interpreter without the work that it repeats: import this first where kernels are interpreted.

A launch puts the interpreter's functions in place of the language's, and so does every call of a device function within
it, at a third of all its time. Here a launch does so once for each file of functions. It computes the same, by the same
functions; without the interpreter, or with one that is built otherwise, nothing is changed.
"""

import os
from contextlib import suppress


def _install() -> None:
    from triton.runtime import interpreter

    executor, patch, scope = interpreter.GridExecutor, interpreter._patch_lang, interpreter._LangPatchScope
    launch, done = executor.__call__, set()

    def patch_once(function):
        if id(function.__globals__) in done:
            return scope()
        done.add(id(function.__globals__))
        return patch(function)

    def launch_anew(self, *arguments, **options):
        done.clear()
        try:
            return launch(self, *arguments, **options)
        finally:
            done.clear()

    interpreter._patch_lang, executor.__call__ = patch_once, launch_anew


if os.environ.get("TRITON_INTERPRET") == "1":
    with suppress(ImportError, AttributeError):
        _install()
