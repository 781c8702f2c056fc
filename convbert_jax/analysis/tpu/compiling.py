"""Compiling for a TPU that is not here, with the program as text."""

import pathlib
import tempfile

import jax

_DUMP = "*.after_codegen.txt"  # the last one, with the compiler's estimates


def compile_as_text(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, str]:
    """The compiled program, and its text.

    By the compiler's own dump. On chips with SparseCores (v5p, v6e, TPU7x) the compiler sends large
    lookups and sums there, and `compiled.as_text()` (jaxlib 0.10.2, libtpu 0.0.52) refuses to read
    back how it starts them, with the stack of C++ on stderr: "async-update instruction should have
    1 operands but sees 3". It serves where nothing was dumped: the program came from the cache.

    Raises:
      jax.errors.JaxRuntimeError: the compiler cannot do it.
    """
    with tempfile.TemporaryDirectory(prefix="convbert_jax.") as folder:
        compiled = lowered.compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        dumps = list(pathlib.Path(folder).glob(_DUMP))
        if len(dumps) != 1:
            return compiled, compiled.as_text()
        return compiled, dumps[0].read_text()
