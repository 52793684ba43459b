"""A GGUF file gives llama.cpp the tokens and the greedy text of the model that was trained."""

from __future__ import annotations

import numpy as np
import pytest
import train_lm
from text.gguf_export import GgufExport, gguf_tokenizer
from text.tokenizers import BpeTokenizer, ByteTokenizer, CharTokenizer, IdTokenizer
from training.flags import FlagErrors

import nn
from minigrad.errors import ArgumentError

pytest.importorskip("gguf")

TEXT = "To be, or not to be: that is the question — whether 'tis nobler in the mind.\n" * 3
TOKENIZERS = {"byte": ByteTokenizer, "bpe": lambda: BpeTokenizer.trained(TEXT, 300)}


def lm(tokenizer, **options):
    """A model that writes printable ASCII: the logits of other tokens are 0. llama.cpp keeps back half a character."""
    model = nn.TransformerLM(tokenizer.vocab_size, 64, 64, 2, 4, num_kv_heads=2, **options, generator=1).eval()
    texts = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
    model.lm_head.weight.data[[not (text.isascii() and text.isprintable()) for text in texts]] = 0
    return model


def greedy(path, prompt, count):
    """The ids that llama.cpp takes for the likeliest after a prompt."""
    xllamacpp = pytest.importorskip("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup, params.cpuparams.n_threads = 256, 1, False, 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    asked = {"prompt": prompt, "max_tokens": count, "temperature": 0, "n_probs": 1, "ignore_eos": True}
    answer = xllamacpp.Server(params).handle_completions(asked)
    return [token["id"] for token in answer["choices"][0]["logprobs"]["content"]], answer


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_llama_cpp_writes_the_same_greedy_text(kind, layout, tmp_path):
    if kind == "bpe":
        pytest.importorskip("tokenizers")
    tokenizer = TOKENIZERS[kind]()
    model = lm(tokenizer, rope_layout=layout)
    assert "llama.cpp" in GgufExport(tmp_path / "m.gguf", "float32", tokenizer).write(model)
    ids, answer = greedy(tmp_path / "m.gguf", "be, or  not — é\n", 30)
    prompt = tokenizer.encode("be, or  not — é\n")
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    ours = nn.generate(model, prompt, 30, temperature=0)[len(prompt) :]
    assert ids == ours.tolist()
    assert answer["choices"][0]["text"] == tokenizer.decode(ours)


@pytest.mark.parametrize("layout", ["float16", "q8_0", "q4_0", "q4_1"])
def test_llama_cpp_runs_a_quantized_model(layout, tmp_path):
    """It rounds activations too, to 8 bits beside blocks, so its logits are near ours and not the same."""
    model = nn.quantize(lm(ByteTokenizer()), layout)
    nn.save_gguf(model, tmp_path / "m.gguf", tokenizer=gguf_tokenizer(ByteTokenizer()))
    ids, answer = greedy(tmp_path / "m.gguf", "To be", 1)
    x = model.next_logits([[*b"To be"]]).numpy()[0].astype(np.float64)
    x -= x.max() + np.log(np.exp(x - x.max()).sum())
    token = answer["choices"][0]["logprobs"]["content"][0]
    assert token["logprob"] == pytest.approx(x[ids[0]], abs=0.1)


def test_the_program_writes_the_file_and_refuses_to_replace_another(tmp_path, capsys):
    file = tmp_path / "out" / "m.gguf"
    small = ["--n-layer", "1", "--n-embd", "32", "--n-head", "2", "--block-size", "8", "--batch-size", "2"]
    flags = [
        *small,
        "--max-iters",
        "1",
        "--eval-iters",
        "1",
        "--sample-tokens",
        "0",
        "--out-dir",
        str(tmp_path / "run"),
    ]
    flags += ["--export-gguf", str(file), "--gguf-weights", "q4_0"]
    assert train_lm.main(flags) == 0
    assert f"exported to {file}" in capsys.readouterr().out
    assert file.stat().st_size > 10_000
    with pytest.raises(FlagErrors, match="--export-gguf: expected a new file"):
        GgufExport(file, "float16", ByteTokenizer())


def test_tokenizers_that_llama_cpp_has_not():
    pytest.importorskip("tokenizers")
    assert gguf_tokenizer(IdTokenizer(9)) is None
    with pytest.raises(ArgumentError, match="of kind 'char'"):
        gguf_tokenizer(CharTokenizer("abc"))
    form = BpeTokenizer.trained(TEXT, 300).hf_json().replace('"add_prefix_space":false', '"add_prefix_space":true')
    with pytest.raises(ArgumentError, match="a byte-level BPE"):
        gguf_tokenizer(BpeTokenizer(form.replace('"add_prefix_space": false', '"add_prefix_space": true')))
