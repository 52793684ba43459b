"""The families of decoders: what Hugging Face's transformers calls the parts and settings of a TransformerLM.

A family is an entry of FAMILIES. Every setting of a config.json is read, known to leave the logits alone, or refused by
name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from minigrad.errors import ArgumentError, FileFormatError
from .checks import is_whole
from .transformer import TransformerLM

CONFIG = "config.json"
WRITERS = "save_pretrained of transformers writes such files, and nn.save_pretrained"

# Our name of a part -> theirs. Of parts that share a name the rows lie below each other, in this order.
BLOCK = {
    "ln1": "input_layernorm",
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.output_proj": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "ln2": "post_attention_layernorm",
    "ffn.w1": "mlp.gate_proj",
    "ffn.w2": "mlp.down_proj",
    "ffn.w3": "mlp.up_proj",
}
OUTER = {"token_embeddings": "embed_tokens", "ln_final": "norm"}
QKV, GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"
JOINT = {"attn.q_proj": QKV, "attn.k_proj": QKV, "attn.v_proj": QKV, "ffn.w1": GATE_UP, "ffn.w3": GATE_UP}
GPT2_BLOCK = {
    "ln1": "ln_1",
    "attn.q_proj": "attn.c_attn",
    "attn.k_proj": "attn.c_attn",
    "attn.v_proj": "attn.c_attn",
    "attn.output_proj": "attn.c_proj",
    "ln2": "ln_2",
    "ffn.w1": "mlp.c_fc",
    "ffn.w2": "mlp.c_proj",
}

# Their setting -> our argument; those with a default may be left out of a config.json.
SETTINGS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "hidden_size": "d_model",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "d_ff",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
BIASED = {**SETTINGS, "attention_bias": "attention_bias"}
GPT2_SETTINGS = {
    "vocab_size": "vocab_size",
    "n_positions": "context_length",
    "n_embd": "d_model",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_inner": "d_ff",
    "layer_norm_epsilon": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}
DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "n_inner": None,
    "layer_norm_epsilon": 1e-5,
}

# Settings that must have this value, or one of these, since TransformerLM has no other.
FIXED: dict[str, Any] = {"quantization_config": None, "is_encoder_decoder": False, "add_cross_attention": False}
ROTARY = {**FIXED, "hidden_act": "silu", "partial_rotary_factor": 1.0, "rope_interleaved": False, "mlp_bias": False}
UNBIASED = {**ROTARY, "attention_bias": False}
TANH = ("gelu_pytorch_tanh", "gelu")  # old configurations of Gemma say "gelu", and mean this
GEMMA = {
    **ROTARY,
    "hidden_act": TANH,
    "hidden_activation": (None, *TANH[:1]),
    "use_bidirectional_attention": (None, False),
}
GPT2 = {
    **FIXED,
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}

# Settings that the logits don't depend on: of training, of the tokenizer, of how transformers runs or generates.
# (A family with windows in some layers reads max_window_layers.)
IRRELEVANT = frozenset({
    "_attn_implementation_autoset", "_name_or_path", "architectures", "attn_implementation", "auto_map",
    "bos_token_id", "chunk_size_feed_forward", "decoder_start_token_id", "do_sample", "dtype", "eos_token_id",
    "id2label", "initializer_range", "is_llama_config", "label2id", "max_length", "max_window_layers", "model_type",
    "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type", "return_dict",
    "sep_token_id", "task_specific_params", "temperature", "tokenizer_class", "top_k", "top_p", "torch_dtype",
    "torchscript", "transformers.js_config", "transformers_version", "unk_token_id", "use_cache",
})  # fmt: skip
GPT2_IRRELEVANT = frozenset({
    "n_ctx", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "summary_type", "summary_use_proj",
})  # fmt: skip

# What a family's models may differ in, beside sizes; the values are TransformerLM's defaults.
TRAITS: dict[str, Any] = {
    "attention_bias": False, "qk_norm": False, "ffn": "swiglu", "norm": "rms", "positions": "rotary"
}  # fmt: skip
TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class Family:
    """How transformers writes the models of one model_type."""

    architecture: str
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments of TransformerLM that all of them have
    settings: Mapping[str, str] = field(default_factory=lambda: SETTINGS)
    fixed: Mapping[str, Any] = field(default_factory=lambda: UNBIASED)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # where they aren't DEFAULTS
    window: str | None = None  # "one" for all layers, or "each" layer has it or not
    dropouts: tuple[str, ...] = ("attention_dropout",)  # of attention weights, then of branches, then of embeddings
    irrelevant: frozenset[str] = frozenset()
    prefix: str = "model."
    layers: str = "layers"
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER)
    block: Mapping[str, str] = field(default_factory=lambda: BLOCK)
    transposed: bool = False  # matrices of blocks are (in, out)
    norm_offset: float = 0.0  # what a norm adds to its weight

    def theirs(self, name: str) -> str:
        """The name that transformers has for a parameter.

        >>> FAMILIES["llama"].theirs("layers.3.attn.output_proj.weight")
        'model.layers.3.self_attn.o_proj.weight'
        """
        path, _, kind = name.rpartition(".")
        if path == "lm_head":
            return name
        if path in self.outer:
            return f"{self.prefix}{self.outer[path]}.{kind}"
        _, number, part = path.split(".", 2)
        return f"{self.prefix}{self.layers}.{number}.{self.block[part]}.{kind}"

    def has(self, name: str, value: Any) -> bool:
        """Whether its models may have this value of one of the TRAITS."""
        free = name in self.settings.values() and isinstance(value, bool)  # a setting of theirs: on or off
        return free or self.options.get(name, TRAITS[name]) == value


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", settings=BIASED, fixed=ROTARY),
    "mistral": Family("MistralForCausalLM", window="one", defaults={"sliding_window": 4096}),
    "qwen2": Family("Qwen2ForCausalLM", {"attention_bias": "qkv"}, fixed=ROTARY, window="each"),
    "qwen3": Family(
        "Qwen3ForCausalLM", {"qk_norm": True}, BIASED, fixed=ROTARY, window="each", defaults={"head_dim": 128}
    ),
    "gemma": Family(
        "GemmaForCausalLM", {"ffn": "geglu", "scale_embeddings": True}, BIASED, fixed=GEMMA, norm_offset=1.0,
        defaults={"head_dim": 256, "tie_word_embeddings": True},
    ),
    "gpt2": Family(
        "GPT2LMHeadModel", {"attention_bias": True, "ffn": "gelu", "norm": "layer", "positions": "learned"},
        GPT2_SETTINGS, GPT2, defaults={"tie_word_embeddings": True}, irrelevant=GPT2_IRRELEVANT,
        dropouts=("attn_pdrop", "resid_pdrop", "embd_pdrop"), prefix="transformer.", layers="h", transposed=True,
        outer={"token_embeddings": "wte", "position_embeddings": "wpe", "ln_final": "ln_f"}, block=GPT2_BLOCK,
    ),
    "phi3": Family(
        "Phi3ForCausalLM", window="one", block=BLOCK | JOINT, defaults={"rms_norm_eps": 1e-5},
        dropouts=("attention_dropout", "resid_pdrop", "embd_pdrop"),
        irrelevant=frozenset({"original_max_position_embeddings"}),  # of the long contexts that are refused
    ),
}  # fmt: skip


# ---- from settings to arguments --------------------------------------------------------------------------------------


def arguments_of(config: Mapping[str, Any], ignore: Iterable[str] = ()) -> dict[str, Any]:
    """The arguments of TransformerLM for a config.json; an ArgumentError names what there is no argument for."""
    family = _checked_family(config, set(ignore))
    defaults = {**DEFAULTS, **family.defaults}
    arguments = {ours: config.get(name, defaults.get(name)) for name, ours in family.settings.items()}
    arguments |= {**family.options, "window": None if "sliding_window" in ignore else _windows_of(family, config)}
    if family.options.get("positions") == "learned":
        return arguments
    given = [config.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    if not all(isinstance(part, dict) for part in given):
        raise FileFormatError(f"rope_scaling and rope_parameters in {CONFIG} as objects, or null", repr(given), WRITERS)
    rope = {**given[0], **given[1]}
    theta = rope.pop("rope_theta", config.get("rope_theta", 10000.0))
    if rope.get("partial_rotary_factor") == 1:
        del rope["partial_rotary_factor"]
    plain = rope.keys() <= {"rope_type", "type"} and all(value == "default" for value in rope.values())
    if rope.get("rope_type", rope.get("type")) == "yarn":
        rope.setdefault("original_max_position_embeddings", arguments["context_length"])
    return {**arguments, "rope_theta": theta, "rope_scaling": None if plain else rope, "rope_layout": "half"}


def _windows_of(family: Family, config: Mapping[str, Any]) -> Any:
    """The sliding window of a config.json, or one for each layer; None where it is as wide as the context."""
    window = config.get("sliding_window", family.defaults.get("sliding_window"))
    longest = config.get("max_position_embeddings")
    window = None if is_whole(window, 1) and is_whole(longest, 1) and window >= longest else window
    if family.window != "each" or window is None or not config.get("use_sliding_window", False):
        return None if family.window == "each" else window
    count = config["num_hidden_layers"]
    if (types := config.get("layer_types")) is None:
        first = config.get("max_window_layers", 28)
        types = [("full_attention", "sliding_attention")[i >= first] for i in range(count)] if is_whole(first, 0) else 0
    if not (isinstance(types, list) and len(types) == count and all(x in TYPES for x in map(str, types))):
        raise FileFormatError(f"layer_types, {sorted(TYPES)} for each of {count} layers", repr(types)[:99], WRITERS)
    return [window if kind == "sliding_attention" else None for kind in types]


def _checked_family(config: Mapping[str, Any], ignore: set[str]) -> Family:
    """The family of a config.json, whose settings all have a counterpart in TransformerLM, or are ignored."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        hint = "other families compute something else"
        raise ArgumentError(f"a model_type of {tuple(FAMILIES)}", repr(kind), hint)
    family = FAMILIES[kind]
    needed = family.settings.keys() - DEFAULTS.keys()
    if missing := sorted(needed - config.keys()):
        raise FileFormatError(f"{CONFIG} with {sorted(needed)}", f"none of {missing}", WRITERS)
    fixed = dict(family.fixed)
    if family.window is None and _windows_of(family, config) is not None:
        fixed["sliding_window"] = None
    if family.window != "each":
        fixed["use_sliding_window"] = False
    allowed = {name: value if isinstance(value, tuple) else (value,) for name, value in fixed.items()}
    found = {name: config.get(name, values[0]) for name, values in allowed.items()}
    if wrong := [name for name, value in found.items() if value not in allowed[name] and name not in ignore]:
        expected = ", ".join(f"{name}={allowed[name][0]!r}" for name in wrong)
        got = ", ".join(f"{name}={found[name]!r}" for name in wrong)
        raise ArgumentError(expected, got, "TransformerLM has no counterpart")
    known = {*family.settings, *fixed, *IRRELEVANT, *family.irrelevant, *family.dropouts, *ignore, "sliding_window"}
    if family.options.get("positions") != "learned":
        known |= {"rope_theta", "rope_scaling", "rope_parameters"}
    if family.window == "each":
        known |= {"use_sliding_window", "layer_types"}
    if unknown := sorted(config.keys() - known):
        hint = f"if the logits don't depend on them: ignore={unknown}"
        got = ", ".join(f"{name}={config[name]!r}" for name in unknown)
        raise ArgumentError("settings that load_pretrained knows", got, hint)
    return family


# ---- and back --------------------------------------------------------------------------------------------------------


def model_type_of(model: TransformerLM, wish: str | None = None) -> str:
    """The first family that has models like this one, or the one that is wished for."""
    if wish is not None and wish not in FAMILIES:
        raise ArgumentError(f"a model_type of {tuple(FAMILIES)}, or None", repr(wish), "None takes one that fits")
    windows = set(model.windows)
    if 0 in windows or any(block.attn.pattern is not None for block in model.layers):
        expected, got = "full attention, or that of a window, in all layers", "linear attention, or a pattern"
        raise ArgumentError(expected, got, "no family of transformers that is known has another")
    sizes = windows - {None}
    width, heads = model.token_embeddings.embedding_dim, model.layers[0].attn.num_heads
    lacking = {}
    for kind, family in FAMILIES.items():
        faults = [f"{name}={value!r}" for name, value in model.traits.items() if not family.has(name, value)]
        if len(sizes) > {None: 0, "one": 1, "each": 1}[family.window] or (family.window == "one" and len(windows) > 1):
            faults.append(f"windows of {model.windows}")
        if model.layers[0].attn.head_dim * heads != width and "head_dim" not in family.settings.values():
            faults.append(f"head_dim={model.layers[0].attn.head_dim}")
        if kind in ("llama", "phi3", "qwen2") and width % heads:
            faults.append(f"d_model={width} with {heads} heads")
        lacking[kind] = faults
    fitting = [kind for kind, faults in lacking.items() if not faults and wish in (None, kind)]
    if not fitting:
        nearest = wish or min(lacking, key=lambda kind: len(lacking[kind]))
        got = f"{', '.join(lacking[nearest])}, which {nearest} doesn't have"
        raise ArgumentError(f"a model of {wish or 'a family of ' + repr(tuple(FAMILIES))}", got, "docs/models.md")
    return fitting[0]


def arguments_from(model: TransformerLM) -> dict[str, Any]:
    """The arguments with which TransformerLM makes a model like this one."""
    block = model.layers[0]
    return {
        "vocab_size": model.vocab_size,
        "context_length": model.context_length,
        "d_model": model.token_embeddings.embedding_dim,
        "num_layers": len(model.layers),
        "num_heads": block.attn.num_heads,
        "d_ff": block.ffn.w1.out_features,
        "num_kv_heads": block.attn.num_kv_heads,
        "head_dim": block.attn.head_dim,
        "norm_eps": block.ln1.eps,
        "tie_embeddings": model.lm_head.weight is model.token_embeddings.weight,
        **model.traits,
    }


def config_of(model: TransformerLM, kind: str) -> dict[str, Any]:
    """The settings of config.json for a model, all but which tokens are special."""
    family, arguments, block = FAMILIES[kind], arguments_from(model), model.layers[0]
    probabilities = (block.attn.dropout, block.dropout.p, model.dropout.p)
    config = {
        "architectures": [family.architecture],
        "model_type": kind,
        **{name: value[0] if isinstance(value, tuple) else value for name, value in family.fixed.items() if value},
        **{name: arguments[ours] for name, ours in family.settings.items()},
        **dict(zip(family.dropouts, probabilities, strict=False)),
        "torch_dtype": str(model.lm_head.weight.dtype),
    }
    if block.attn.rope is not None:
        scaling = dict(block.attn.rope.scaling or {})
        if scaling:
            scaling["rope_type"] = scaling.pop("type", scaling.get("rope_type"))
        config |= {"rope_theta": block.attn.rope.theta, "rope_scaling": scaling or None}
    window = next((window for window in model.windows if window), None)
    if family.window is not None:
        config["sliding_window"] = window
    if family.window == "each":
        types = ["sliding_attention" if window else "full_attention" for window in model.windows]
        config |= {"use_sliding_window": window is not None, "layer_types": types}
    return config
