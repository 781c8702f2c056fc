"""Ahead-of-time compilation for TPUs, with the text of the program."""

import pathlib
import tempfile

import jax

_DUMP = "*.after_codegen.txt"  # last dump, with the compiler's estimates


def compile_as_text(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, str]:
    """Compiles a lowered program and returns it with its text.

    The text is the compiler's dump. On chips with SparseCores (v5p, v6e, TPU7x) `as_text()` fails
    on offloaded operations (jaxlib 0.10.2, libtpu 0.0.52): "async-update instruction should have 1
    operands but sees 3". It is used only if the program came from the cache, which dumps nothing.

    Raises:
      jax.errors.JaxRuntimeError: compilation failed.
    """
    with tempfile.TemporaryDirectory(prefix="convbert_jax.") as folder:
        compiled = lowered.compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        dumps = list(pathlib.Path(folder).glob(_DUMP))
        if len(dumps) != 1:
            return compiled, compiled.as_text()
        return compiled, dumps[0].read_text()
