"""Vocabularies that are trained once for all tests."""

import dataclasses

import pytest

from convbert_jax.config import TokenizerSection
from convbert_jax.data.tokenizer.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def trained(documents, tmp_path_factory):
    """trained(kind=..., **fields): a vocabulary of 300 entries; its folder must not be changed."""
    made = {}

    def train(**fields):
        section = dataclasses.replace(TokenizerSection(vocab_size=300), **fields)
        if section not in made:
            folder = tmp_path_factory.mktemp("vocabulary")
            made[section] = train_tokenizer(documents, section, folder)
        return made[section]

    return train
