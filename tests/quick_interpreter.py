"""Triton's interpreter without the work that it repeats: import this first where kernels are interpreted.

A launch puts the interpreter's functions in place of the language's, and so does every call of a device function in it,
at a third of all its time. Here a launch does so once for each file of functions. Every sum and product of integers is
computed again in 64 bits and compared with its bounds, at another third, by a check whose outcome is told only where
debugging was asked for: here it is left out elsewhere. What a type says of itself is found out once for each name, and
what a tensor says of its shape once for each shape, at a tenth. It computes the same by the same functions; without the
interpreter, or with one that is built otherwise, nothing is changed.
"""

import os
from contextlib import suppress


def _install() -> None:
    from triton.runtime import interpreter

    semantic, block, tensor = interpreter.interpreter_semantic, interpreter.tl.block_type, interpreter.tl.tensor
    patch = _patching(interpreter._patch_lang, interpreter._LangPatchScope, interpreter.GridExecutor)
    check = _checking(semantic.binary_op_sanitize_overflow_impl, semantic.builder.options)
    array_type = _naming(interpreter._get_np_dtype)
    made = _making_blocks(block.__init__), _making_tensors(tensor.__init__)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch
    interpreter._get_np_dtype, semantic.binary_op_sanitize_overflow_impl = array_type, check
    block.__init__, tensor.__init__ = made


def _patching(patch, scope, executor):
    """Return what patches the language for a file of functions, once in a launch, and what launches."""
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

    return patch_once, launch_anew


def _checking(check, options):
    """Return a check of integers that is done where its outcome is told."""

    def check_where_it_is_told(*arguments):
        if options.debug:
            check(*arguments)

    return check_where_it_is_told


def _naming(array_type):
    """Return what finds NumPy's type of one of the language's by its name."""
    found = {}

    def array_type_of(kind):
        if kind.name not in found:
            found[kind.name] = array_type(kind)
        return found[kind.name]

    return array_type_of


def _making_blocks(make):
    """Return what makes the type of a block as one of the same elements and shape was made."""
    found = {}

    def make_block(self, element_ty, shape):
        key = element_ty.name, tuple(getattr(size, "value", size) for size in shape)
        if key not in found:
            make(self, element_ty, shape)
            found[key] = dict(vars(self))
        vars(self).update(found[key], element_ty=element_ty)

    return make_block


def _making_tensors(make):
    """Return what makes a tensor with what one of the same shape says of it."""
    found = {}

    def make_tensor(self, handle, type):
        key = tuple(type.shape) if type.is_block() else ()
        if key not in found:
            make(self, handle, type)
            found[key] = {"shape": self.shape, "numel": self.numel}
        vars(self).update(found[key], handle=handle, type=type, dtype=type.scalar)

    return make_tensor


if os.environ.get("TRITON_INTERPRET") == "1":
    with suppress(ImportError, AttributeError):
        _install()
