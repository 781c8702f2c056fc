"""ConvBERT-small (14M parameters) with replaced token detection; lengths and learning rates of the
official code.

Published for this size after 1M steps on OpenWebText: GLUE test mean 78.9, SQuAD 1.1 dev 77.1 /
84.1 EM / F1 (ConvBERT tables 3 and 4). 16.4 G tokens, 1.1e18 FLOPs.

    python -m convbert_jax.main --config=configs/small.py
    python -m convbert_jax.main --config=configs/small.py:paper --config.tokenizer.path=vocab.txt

Corpus: English Wikipedia of November 2023 in parquet files (wikimedia/wikipedia on the Hugging Face
hub, 20 GB of text), which need only the packages of requirements.txt. The paper used OpenWebText,
which is not in the TFDS catalog; other large corpora of the catalog (C4, wiki40b, lm1b) need
TensorFlow and Beam. For another corpus set
--config.data.source=text:FOLDER/**/*.txt, parquet:..., tfds:... or hub:OWNER/NAME/FILES.
"""

from configs import variants


def get_config(variant: str = "default"):
    config = variants.start("small", variant)
    config.model.layers = 12
    config.model.hidden_size = 256
    config.model.embedding_size = 128
    config.model.heads = 4
    config.model.ffn_size = 1_024
    config.model.scan_unroll = 12
    config.generator.size = 0.25
    config.generator.scan_unroll = 12
    config.data.source = "hub:wikimedia/wikipedia/20231101.en/*.parquet"
    config.optimizer.learning_rate = 3e-4
    config.train.batch_size = 128
    return variants.finish(config)
