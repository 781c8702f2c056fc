"""Writes checkpoints of pre-trained convolutions with Mesh TensorFlow itself, and what it computes.

    python3.11 -m venv mesh && mesh/bin/pip install "tensorflow-cpu==2.12.*" \
        mesh-tensorflow==0.1.21 gin-config "tensorflow-datasets<4.9.4"
    mesh/bin/python tests/interop/mesh_tensorflow/make_mesh_checkpoint.py

No test needs it: what it wrote is committed, in mesh/ beside this file. Layers and sizes are those
of google-research's pretrained_conv/gin/; weights are random, of a size at which no mistake is too
small to see. With --size and --output other sizes, for
benchmarks/fidelity/mesh_tensorflow_parity.py.
"""

import argparse
import pathlib
import zlib

import gin
import mesh_tensorflow as mtf
import mesh_tensorflow.transformer.transformer_layers
import numpy as np
import tensorflow.compat.v1 as tf
from mesh_tensorflow.transformer import transformer

FOLDER = pathlib.Path(__file__).resolve().parent / "mesh"
STEP = 524_288
# words, layers, channels, inside of the feed-forward, heads of 64 (tiny: of 8)
SIZES = {
    "tiny": (128, 2, 16, 24, 2, 8),
    "small": (32_128, 6, 512, 2048, 8, 64),
    "base": (32_128, 12, 768, 3072, 12, 64),
}
# Kind of convolution, table of positions, and names of norms: as of older gin files, or of newer.
FORMS = {
    "light": ("lightweight_conv", True, "legacy"),
    "dynamic": ("dynamic_conv", False, "today"),
}
GIN = """
import mesh_tensorflow.transformer.transformer_layers
num_layers = {layers}
d_model = {d_model}
d_ff = {d_ff}
num_heads = {heads}
d_kv = {d_kv}
transformer.make_layer_stack.num_layers = %num_layers
Unitransformer.d_model = %d_model
Unitransformer.max_length = 512
Unitransformer.positional_embedding = {places}
Unitransformer.shared_embedding_and_softmax_weights = True
DenseReluDense.hidden_size = %d_ff
SelfAttention.num_heads = %num_heads
SelfAttention.key_value_size = %d_kv
EncDecAttention.num_heads = %num_heads
EncDecAttention.key_value_size = %d_kv
encoder/transformer.make_layer_stack.layers = [
    @transformer_layers.LocalConvAttnBlock,
    @transformer_layers.DenseReluDense,
]
decoder/transformer.make_layer_stack.layers = [
    @transformer_layers.LocalConvAttnBlock,
    @transformer_layers.EncDecAttention,
    @transformer_layers.DenseReluDense,
]
LocalConvAttnBlock.output_size = %d_model
LocalConvAttnBlock.num_unique_depth_filters = 2
LocalConvAttnBlock.attention_type = "{kind}"
encoder/transformer_layers.LocalConvAttnBlock.max_relative_pos = 4
encoder/transformer_layers.LocalConvAttnBlock.min_relative_pos = -4
decoder/transformer_layers.LocalConvAttnBlock.max_relative_pos = 0
decoder/transformer_layers.LocalConvAttnBlock.min_relative_pos = -8
"""
NORMS = {
    "legacy": """
transformer.LayerStack.dropout_rate = 0.0
transformer.LayerStack.norm_epsilon = 1e-6
""",
    "today": """
transformer.LayerStack.dropout_rate = None
transformer.LayerStack.norm_epsilon = None
transformer.LayerStack.sublayers_initial = [@transformer.sublayer_dropout]
transformer.LayerStack.sublayers_per_layer = [
    @transformer.sublayer_rms_norm,
    @transformer.sublayer_call_layer,
    @transformer.sublayer_dropout,
    @transformer.sublayer_residual,
]
transformer.LayerStack.sublayers_final = [
    @transformer.sublayer_rms_norm,
    @transformer.sublayer_dropout,
]
""",
}
SOURCES, TARGETS = (13, 6, 4, 9), (5, 12, 8, 3)  # lengths of the rows
LONGEST = 16  # that it writes


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--output", type=pathlib.Path, default=FOLDER)
    arguments = parser.parse_args()
    for form in FORMS:
        write(arguments.output / form, arguments.size, form)


def write(folder, size, form):
    words, layers, d_model, d_ff, heads, d_kv = SIZES[size]
    kind, places, norms = FORMS[form]
    gin.clear_config()
    sizes = {"layers": layers, "d_model": d_model, "d_ff": d_ff, "heads": heads, "d_kv": d_kv}
    gin.parse_config(GIN.format(**sizes, places=places, kind=kind) + NORMS[norms])
    folder.mkdir(parents=True, exist_ok=True)
    sources, targets = rows(SOURCES, words, 1), rows(TARGETS, words, 2)
    path = str(folder / f"model.ckpt-{STEP}")
    expected = {"sources": sources, "targets": targets}
    expected |= compute(words, sources, targets, path)
    expected["written"] = decode(words, sources, path)
    (folder / "operative_config.gin").write_text(gin.operative_config_str())
    (folder / "checkpoint").unlink()  # holds the path of this machine
    np.savez_compressed(folder / "expected.npz", **expected)


def rows(lengths, words, seed):
    """Texts with the end mark, 1, behind them, and padding, 0."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, words, (len(lengths), max(lengths)))
    for row, length in zip(ids, lengths, strict=True):
        row[length - 1], row[length:] = 1, 0
    return ids.astype(np.int32)


def value(name, shape):
    """Random, the same for a name whenever it is asked for."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    drawn = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("scale"):
        return 1 + 0.2 * drawn
    if name.endswith("bias"):
        return 0.2 * drawn
    if len(shape) == 1 or name.endswith("embedding"):
        return drawn
    return drawn * np.float32(shape[0] ** -0.5)


def compute(words, sources, targets, path):
    """Saves a checkpoint after a step of Adafactor; (encoder's output, logits) of its weights."""
    with tf.Graph().as_default():
        mesh, model = make(words)
        found = {}
        encode = model.encoder.call_simple

        def keep(*args, **kwargs):
            found["encoded"], loss = encode(*args, **kwargs)
            return found["encoded"], loss

        model.encoder.call_simple = keep
        given = [imported(mesh, ids) for ids in (sources, targets)]
        found["logits"], loss = model.call_simple(
            *given, compute_loss=True, mode=tf.estimator.ModeKeys.EVAL
        )
        [gradients] = [
            mtf.gradients([loss], [v.outputs[0] for v in mesh.graph.trainable_variables])
        ]
        updates = mtf.optimize.AdafactorOptimizer(learning_rate=1e-6).apply_grads(
            gradients, mesh.graph.trainable_variables
        )
        lowering = lower(mesh)
        outputs = {name: lowering.export_to_tf_tensor(tensor) for name, tensor in found.items()}
        step = tf.group([lowering.lowered_operation(update) for update in updates])
        tf.train.get_or_create_global_step()
        saver = tf.train.Saver(tf.global_variables())
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for variable in tf.global_variables():
                name = variable.op.name
                if "_slot_" not in name and name != "global_step":
                    variable.load(value(name, variable.shape.as_list()), session)
            tf.train.get_global_step().load(STEP, session)
            session.run(lowering.copy_masters_to_slices())
            session.run(step)
            session.run(lowering.copy_slices_to_masters())
            results = session.run(outputs)
            saver.save(session, path, write_meta_graph=False)
    return results


def decode(words, sources, path):
    """[rows, LONGEST]: what it writes of these weights, the most probable at each step."""
    with tf.Graph().as_default():
        mesh, model = make(words)
        written = model.decode(imported(mesh, sources), max_decode_length=LONGEST)
        lowering = lower(mesh)
        ids = lowering.export_to_tf_tensor(written)
        with tf.Session() as session:
            tf.train.Saver(tf.global_variables()).restore(session, path)
            session.run(lowering.copy_masters_to_slices())
            return session.run(ids)


def make(words):
    graph = mtf.Graph()
    model = transformer.make_bitransformer(input_vocab_size=words, output_vocab_size=words)
    return mtf.Mesh(graph, "mesh"), model


def imported(mesh, ids):
    shape = [mtf.Dimension("batch", ids.shape[0]), mtf.Dimension("length", ids.shape[1])]
    return mtf.import_tf_tensor(mesh, tf.constant(ids), shape=mtf.Shape(shape))


def lower(mesh):
    implementation = mtf.placement_mesh_impl.PlacementMeshImpl(shape=[], layout=[], devices=[""])
    return mtf.Lowering(mesh.graph, {mesh: implementation})


if __name__ == "__main__":
    main()
