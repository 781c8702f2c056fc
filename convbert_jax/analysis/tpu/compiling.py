"""Compiling for a TPU that is not here, with the program as text."""

import pathlib
import tempfile

import jax

_DUMP = "*.after_codegen.txt"  # the last one, with the compiler's estimates


def compile_as_text(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, str]:
    """The compiled program, and its text.

    Not by `compiled.as_text()` alone: on chips with SparseCores (v5p, v6e) the compiler sends large
    lookups there, and jaxlib (0.10.2, libtpu 0.0.52) refuses to read back how it starts them:
    "async-update instruction should have 1 operands but sees 3". The compiler's own dump has them.

    Raises:
      jax.errors.JaxRuntimeError: the compiler cannot do it.
    """
    with tempfile.TemporaryDirectory(prefix="convbert_jax.") as folder:
        compiled = lowered.compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        try:
            return compiled, compiled.as_text()
        except jax.errors.JaxRuntimeError:
            dumps = list(pathlib.Path(folder).glob(_DUMP))
            if len(dumps) != 1:
                raise
            return compiled, dumps[0].read_text()
