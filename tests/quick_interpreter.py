"""Triton's interpreter without the work that it repeats: import this first where kernels are interpreted.

A launch puts the interpreter's functions in place of the language's, and so does every call of a device function within
it, at a third of all its time. Here a launch does so once for each file of functions. Each sum and product of integers is
computed again in 64 bits and compared with its bounds, at another third, by a check that is then left out because nobody
asked for debugging: here it is left out before. The array type of a language's type is looked up once for each name. It
computes the same, by the same functions; without the interpreter, or with one that is built otherwise, nothing is changed.
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

    semantic, array_type = interpreter.interpreter_semantic, interpreter._get_np_dtype
    check, array_types = semantic.binary_op_sanitize_overflow_impl, {}

    def check_where_it_is_told(*arguments):
        if semantic.builder.options.debug:
            check(*arguments)

    def array_type_of(kind):
        if kind.name not in array_types:
            array_types[kind.name] = array_type(kind)
        return array_types[kind.name]

    interpreter._patch_lang, executor.__call__ = patch_once, launch_anew
    semantic.binary_op_sanitize_overflow_impl, interpreter._get_np_dtype = check_where_it_is_told, array_type_of


if os.environ.get("TRITON_INTERPRET") == "1":
    with suppress(ImportError, AttributeError):
        _install()
