"""Language models of transformers at tiny width, from their own configurations."""

from __future__ import annotations

from functools import partial
from typing import Any

from zoo.libraries import N_TOKENS, VOCABULARY, LibraryModel, from_config, with_labels

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 24, "max_position_embeddings": N_TOKENS, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "head_dim": 4}


def _encoder_decoder(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24, "max_position_embeddings": N_TOKENS, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, **more,
    }  # fmt: skip


_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", "BertConfig", _TEXT),
    "bert_mlm": ("BertForMaskedLM", "BertConfig", _TEXT),
    "roberta": (
        "RobertaForSequenceClassification", "RobertaConfig",
        {**_TEXT, "max_position_embeddings": N_TOKENS + 2, "pad_token_id": 1},
    ),
    "distilbert": (
        "DistilBertForSequenceClassification", "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 24,
         "max_position_embeddings": N_TOKENS},
    ),
    "albert": ("AlbertForSequenceClassification", "AlbertConfig", {**_TEXT, "embedding_size": 8}),
    "electra": (
        "ElectraForSequenceClassification", "ElectraConfig", {**_TEXT, "embedding_size": 8}
    ),
    "gpt2": (
        "GPT2LMHeadModel", "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4,
         "n_positions": N_TOKENS, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "gpt_neo": (
        "GPTNeoForCausalLM", "GPTNeoConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_layers": 2, "num_heads": 4,
         "attention_types": [[["global", "local"], 1]], "window_size": 4,
         "max_position_embeddings": N_TOKENS, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _TEXT),
    "gptj": (
        "GPTJForCausalLM", "GPTJConfig",
        {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "rotary_dim": 2,
         "n_positions": N_TOKENS, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "opt": (
        "OPTForCausalLM", "OPTConfig", {**_TEXT, "ffn_dim": 24, "word_embed_proj_dim": 16}
    ),
    "bloom": (
        "BloomForCausalLM", "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 4,
         "bos_token_id": 1, "eos_token_id": 2},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "llama_eager": (
        "LlamaForCausalLM", "LlamaConfig", {**_GROUPED, "attn_implementation": "eager"}
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _GROUPED),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", _GROUPED),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_GROUPED, "sliding_window": 4}),
    "phi": ("PhiForCausalLM", "PhiConfig", {**_TEXT, "num_key_value_heads": 4}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _GROUPED),
    "falcon": ("FalconForCausalLM", "FalconConfig", {**_TEXT, "alibi": False}),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", _GROUPED),
    "mixtral": (
        "MixtralForCausalLM", "MixtralConfig",
        {**_GROUPED, "num_experts_per_tok": 2, "num_local_experts": 4},
    ),
    "t5": (
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1,
         "num_heads": 4, "decoder_start_token_id": 0},
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", _encoder_decoder()),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", _encoder_decoder()),
    "deberta_v2": (
        "DebertaV2ForTokenClassification", "DebertaV2Config",
        {**_TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"],
         "position_buckets": 4},
    ),
    "gpt2_classes": (
        "GPT2ForSequenceClassification", "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4,
         "n_positions": N_TOKENS, "pad_token_id": 0},
    ),
    "funnel": (
        "FunnelForSequenceClassification", "FunnelConfig",
        {"vocab_size": VOCABULARY, "d_model": 16, "block_sizes": [1, 1], "n_head": 4, "d_head": 4,
         "d_inner": 24},
    ),
    "mobilebert": (
        "MobileBertForMaskedLM", "MobileBertConfig",
        {**_TEXT, "embedding_size": 8, "intra_bottleneck_size": 16},
    ),
    "squeezebert": (
        "SqueezeBertForSequenceClassification", "SqueezeBertConfig", {**_TEXT, "embedding_size": 16}
    ),
    "fnet": ("FNetForSequenceClassification", "FNetConfig", _TEXT),
    "convbert": (
        "ConvBertForSequenceClassification", "ConvBertConfig",
        {**_TEXT, "embedding_size": 16, "conv_kernel_size": 3},
    ),
    "mpnet": ("MPNetForSequenceClassification", "MPNetConfig", {**_TEXT, "pad_token_id": 1,
              "max_position_embeddings": N_TOKENS + 2}),
    "modernbert": (
        "ModernBertForMaskedLM", "ModernBertConfig",
        {**_TEXT, "local_attention": 4, "sep_token_id": 2, "cls_token_id": 1},
    ),
    "xlnet": (
        "XLNetForSequenceClassification", "XLNetConfig",
        {"vocab_size": VOCABULARY, "d_model": 16, "n_layer": 2, "n_head": 4, "d_inner": 24},
    ),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_GROUPED, "sliding_window": 4}),
    "cohere": ("CohereForCausalLM", "CohereConfig", _GROUPED),
    "granite": ("GraniteForCausalLM", "GraniteConfig", _GROUPED),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", _GROUPED),
    "persimmon": ("PersimmonForCausalLM", "PersimmonConfig", _TEXT),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {
        **_GROUPED, "num_experts_per_tok": 2, "num_local_experts": 4, "sliding_window": 4,
    }),
    "gpt_bigcode": (
        "GPTBigCodeForCausalLM", "GPTBigCodeConfig",
        {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4,
         "n_positions": N_TOKENS},
    ),
    "openai_gpt": (
        "OpenAIGPTLMHeadModel", "OpenAIGPTConfig",
        {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4,
         "n_positions": N_TOKENS},
    ),
    "ctrl": (
        "CTRLLMHeadModel", "CTRLConfig",
        {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "dff": 24,
         "n_positions": N_TOKENS},
    ),
    "mamba2": (
        "Mamba2ForCausalLM", "Mamba2Config",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 8,
         "head_dim": 4, "state_size": 4, "n_groups": 1, "chunk_size": 4, "pad_token_id": 0},
    ),
    "mpt": (
        "MptForCausalLM", "MptConfig",
        {"vocab_size": VOCABULARY, "d_model": 16, "n_heads": 4, "n_layers": 2,
         "max_seq_len": N_TOKENS},
    ),
    "mt5": (
        "MT5ForConditionalGeneration", "MT5Config",  # whose loss explodes from larger weights
        {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1,
         "num_heads": 4, "decoder_start_token_id": 0, "initializer_factor": 0.05},
    ),
    "mbart": ("MBartForConditionalGeneration", "MBartConfig", _encoder_decoder()),
    "longformer": (
        "LongformerForMaskedLM", "LongformerConfig",
        {**_TEXT, "attention_window": 4, "max_position_embeddings": N_TOKENS + 2,
         "pad_token_id": 1},
    ),
    "led": (
        "LEDForConditionalGeneration", "LEDConfig",
        _encoder_decoder(attention_window=4, max_encoder_position_embeddings=N_TOKENS,
                         max_decoder_position_embeddings=N_TOKENS),
    ),
    "xlm": (
        "XLMForSequenceClassification", "XLMConfig",
        {"vocab_size": VOCABULARY, "emb_dim": 16, "n_layers": 2, "n_heads": 4,
         "max_position_embeddings": N_TOKENS},
    ),
}  # fmt: skip

_LABELLED = {
    **{f"{name}_labels": _MODELS[name] for name in ("bert", "gpt2", "llama", "t5")},
    "bert_span": ("BertForQuestionAnswering", "BertConfig", _TEXT),
}

LANGUAGE = {
    **{
        f"transformers_{name}": LibraryModel(build=partial(with_labels, model, config, **settings))
        for name, (model, config, settings) in _LABELLED.items()
    },
    **{
        f"transformers_{name}": LibraryModel(build=partial(from_config, model, config, **settings))
        for name, (model, config, settings) in _MODELS.items()
    },
}
