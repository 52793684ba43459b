"""Texts and vocabularies: corpora, tokenizers, the lexicon of pronunciations."""
