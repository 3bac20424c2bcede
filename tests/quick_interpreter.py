"""Triton's interpreter without the work that it repeats: import this first where kernels are interpreted.

A launch puts the interpreter's functions in place of the language's, and so does every call of a device function within
it, at a third of all its time. Here a launch does so once for each file of functions. Each sum and product of integers is
computed again in 64 bits and compared with its bounds, at another third, by a check that is then left out because nobody
asked for debugging: here it is left out before. What a type says of itself is found out once for each name, and what a
tensor says of its shape once for each shape, at a sixth. It computes the same, by the same functions; without the
interpreter, or with one that is built otherwise, nothing is changed.
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

    block, tensor = interpreter.tl.block_type, interpreter.tl.tensor
    make_block, make_tensor, blocks, shapes = block.__init__, tensor.__init__, {}, {}

    def make_block_once(self, element_ty, shape):
        key = element_ty.name, tuple(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key], element_ty=element_ty)

    def make_tensor_once(self, handle, type):
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = {"shape": self.shape, "numel": self.numel}
        vars(self).update(shapes[key], handle=handle, type=type, dtype=type.scalar)

    interpreter._patch_lang, executor.__call__ = patch_once, launch_anew
    semantic.binary_op_sanitize_overflow_impl, interpreter._get_np_dtype = check_where_it_is_told, array_type_of
    block.__init__, tensor.__init__ = make_block_once, make_tensor_once


if os.environ.get("TRITON_INTERPRET") == "1":
    with suppress(ImportError, AttributeError):
        _install()
